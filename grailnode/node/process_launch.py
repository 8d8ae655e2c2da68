"""What a process of a node needs to start, and the kinds of processes that nodes have."""

import os
from dataclasses import dataclass
from typing import Final, Literal

from grailnode.config import Config

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


@dataclass(frozen=True)
class Launch:
    """What a process needs to start; picklable. `echo` shows events on the terminal, too."""

    config: Config
    kind: Kind
    name: str
    echo: bool = True


@dataclass(frozen=True)
class Seat:
    """The place of a process in its group, whose processes torch.distributed brings together at the URL `meeting`."""

    rank: int
    count: int
    meeting: str


def prepare_rank(seat: Seat) -> None:
    """Give this process a GPU of its own and the network interface of its group, before it uses either.

    The other GPUs are hidden, because the current device of torch belongs to a thread, and a rank has several.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible != "":
        names = visible.split(",") if visible else [str(number) for number in range(seat.count)]
        os.environ["CUDA_VISIBLE_DEVICES"] = names[seat.rank % len(names)]
    if seat.meeting.startswith("file:"):
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
