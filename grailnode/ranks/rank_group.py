"""What the ranks of a trainer say to each other, beside the collectives of the backward pass.

Rank 0 has two channels to the others, so that weights are read while gradients are computed: each rank has a thread for
each. Both use gloo, because collectives of NCCL that two threads begin in different orders on two ranks may wait for
each other for ever.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from roles.trainer.learn.state_rows import Share

_NEVER: Final = timedelta(days=365)  # rank 0 waits for groups as long as it takes


@dataclass(frozen=True, kw_only=True)
class RankGroup(Share):
    """The ranks of a trainer, as one of them sees them, which has its share of every tensor."""

    device: torch.device  # on which this rank computes
    mesh: DeviceMesh  # of the collectives of the backward pass
    steps: "dist.ProcessGroup"  # the channels
    reads: "dist.ProcessGroup"

    @classmethod
    def of(cls, device: torch.device) -> "RankGroup":
        """Return the group of all processes of the default process group. Each of them has to call it."""
        count = dist.get_world_size()
        mesh = init_device_mesh(device.type, (count,))
        steps, reads = (dist.new_group(backend="gloo", timeout=_NEVER) for _ in range(2))
        return cls(dist.get_rank(), count, device=device, mesh=mesh, steps=steps, reads=reads)

    def broadcast(self, channel: "dist.ProcessGroup", message: Any = None, source: int = 0) -> Any:
        """Return one rank's message on every rank."""
        box = [message]
        dist.broadcast_object_list(box, src=source, group=channel, device=torch.device("cpu"))
        return box[0]

    def send(self, message: Any, source: int) -> Any:
        """Return one rank's message on every rank, by the channel of steps."""
        return self.broadcast(self.steps, message, source)

    def exchange(self, message: Any, channel: "dist.ProcessGroup | None" = None) -> list[Any]:
        """Return the messages of all ranks on every rank, by the channel of steps if no other is given."""
        messages = [None] * self.count
        dist.all_gather_object(messages, message, group=channel or self.steps)
        return messages

    def add(self, numbers: Sequence[float]) -> float:
        """Return the sum of all ranks' numbers, the same on every rank."""
        return math.fsum(itertools.chain.from_iterable(self.exchange(list(numbers))))

    def wait(self) -> None:
        """Return when all ranks have called this."""
        self.exchange(None)

    def gather(self, own: Tensor, rows: int, target: int = 0) -> Tensor | None:
        """Return a whole tensor on one rank from each rank's contiguous rows on the CPU, and None on the others."""
        if self.rank != target:
            if own.numel():
                dist.send(own.view(-1).view(torch.uint8), target, group=self.reads)
            return None
        whole = own.new_empty(rows, *own.shape[1:])
        whole[self.rows(rows)] = own
        for rank in (rank for rank in range(self.count) if rank != target):
            part = whole[Share(rank, self.count).rows(rows)]
            if part.numel():
                dist.recv(part.view(-1).view(torch.uint8), rank, group=self.reads)
        return whole
