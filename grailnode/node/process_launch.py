"""What a process of a node needs to start, and the kinds of processes that a node of each role has."""

import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal

from grailnode import UserError
from grailnode.config import Config

_GET_ADDRESS: Final = 0x8915  # SIOCGIFADDR of linux/sockios.h

Kind = Literal[
    "beacon", "training", "upload", "download", "canary", "tracking", "coordinator", "site", "miner", "validator"
]
TRAINER_KINDS: Final[tuple[Kind, ...]] = (
    "beacon",
    "training",
    "upload",
    "download",
    "canary",
    "tracking",
    "coordinator",
)

Role = Literal["trainer", "worker", "miner", "validator"]
PROCESSES: Final[Mapping[Role, tuple[Kind, ...]]] = {
    "trainer": ("training", "upload", "download"),
    "worker": ("site",),
    "miner": ("miner",),
    "validator": ("validator",),
}
"""The processes that every node of a role has; those of a trainer with sites are in `process_kinds`."""


def process_kinds(config: Config, role: Role) -> tuple[Kind, ...]:
    """Return the kinds of processes of a node; a host that follows host 0 has no others."""
    if config.trainer.host:
        return ("site",) if role == "worker" else ("training", "upload")
    has_sites = role == "trainer" and config.trainer.outer is not None
    kinds: tuple[Kind, ...] = ("coordinator",) if has_sites else PROCESSES[role]
    if role == "trainer" and config.trainer.external:
        kinds = tuple(kind for kind in kinds if kind != "training")
    if role == "trainer" and config.beacon.key:
        kinds = ("beacon", *kinds)
    if role == "trainer" and config.trainer.canaries:
        kinds = (*kinds, "canary")
    if role == "trainer" and config.trainer.track is not None:
        kinds = (*kinds, "tracking")
    return kinds


@dataclass(frozen=True)
class Launch:
    """What a process needs to start; picklable. `echo` shows events on the terminal, too."""

    config: Config
    kind: Kind
    name: str
    echo: bool = True

    @property
    def process(self) -> str:
        """The name of the process in its log and metrics."""
        return f"{self.name}/{self.kind}" if self.kind in TRAINER_KINDS else self.name


class LostRankError(UserError):
    """A rank on another host does not answer, or has ended. A new start waits for it."""


@dataclass(frozen=True)
class Seat:
    """The place of a process in its group.

    Attributes:
        meeting: where torch.distributed brings the processes together: a file on one host, or the "address:port" of
            rank 0; empty before the supervisor has made a file.
        local: how many ranks each host has, one host after the other.
    """

    rank: int
    count: int
    meeting: str
    local: int

    @property
    def has_other_hosts(self) -> bool:
        return self.local < self.count

    @property
    def leads_host(self) -> bool:
        """Whether this is the first rank of a host other than that of rank 0."""
        return self.rank > 0 and self.rank % self.local == 0


def prepare_rank(seat: Seat) -> None:
    """Give this process a GPU of its own and the network interface of its group, before it uses either.

    The other GPUs are hidden, because the current device of torch belongs to a thread, and a rank has several.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible != "":
        names = visible.split(",") if visible else [str(number) for number in range(seat.local)]
        os.environ["CUDA_VISIBLE_DEVICES"] = names[seat.rank % seat.local % len(names)]
    interface = _interface_towards(seat.meeting) if seat.has_other_hosts else "lo"
    for library in ("GLOO", "NCCL") if interface else ():
        os.environ[f"{library}_SOCKET_IFNAME"] = interface


def _interface_towards(meeting: str) -> str:
    """Return the network interface of this host by which it reaches an address; empty if no one has this route."""
    address, _, port = meeting.rpartition(":")
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, int(port)))  # sends nothing
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode())
                if fcntl.ioctl(probe, _GET_ADDRESS, request)[20:24] == own:
                    return name
    return ""
