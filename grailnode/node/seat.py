"""The place of a process among several that work as one."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Seat:
    """The place of a process in its group.

    Attributes:
        rank: 0 for the process that leads; count: of all processes.
        meeting: the URL by which torch.distributed brings them together: of a file that all of them reach, or
            tcp://HOST:PORT on rank 0's host.
    """

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
