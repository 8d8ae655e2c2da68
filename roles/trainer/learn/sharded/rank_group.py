"""What the ranks of a trainer say to each other, beside the collectives of the backward pass.

Rank 0 has two channels to the others, so that weights are read while gradients are computed: each rank has a thread for
each. Both use gloo, because collectives of NCCL that two threads begin in different orders on two ranks may wait for
each other for ever.

A tensor is divided along its first dimension, as `fully_shard` does: rank r of R has rows r*c to (r+1)*c with
c = ceil(rows / R), and the last ranks may have fewer, or none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_NEVER: Final = timedelta(days=365)  # rank 0 waits for groups as long as it takes


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a trainer, as one of them sees them."""

    rank: int  # of this process
    count: int  # of all ranks
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
        return cls(dist.get_rank(), count, device, mesh, steps, reads)

    def broadcast(self, channel: "dist.ProcessGroup", message: Any = None) -> Any:
        """Return rank 0's message on every rank."""
        box = [message]
        dist.broadcast_object_list(box, src=0, group=channel, device=torch.device("cpu"))
        return box[0]

    def add(self, numbers: Sequence[float]) -> float:
        """Return the sum of all ranks' numbers, the same on every rank. All ranks give equally many."""
        own = torch.tensor(numbers, dtype=torch.float64)
        everyone = [torch.empty_like(own) for _ in range(self.count)]
        dist.all_gather(everyone, own, group=self.steps)
        return math.fsum(torch.cat(everyone).tolist())

    def wait(self) -> None:
        """Return when all ranks have called this."""
        self.add([0.0])

    def rows(self, rank: int, rows: int) -> slice:
        """Return which of a tensor's rows a rank has."""
        share = -(-rows // self.count)
        return slice(min(rank * share, rows), min((rank + 1) * share, rows))

    def gather(self, own: Tensor, rows: int) -> Tensor | None:
        """Return a whole tensor on rank 0 from each rank's contiguous rows on the CPU, and None on the other ranks."""
        if self.rank > 0:
            self._send(own, 0, self.reads)
            return None
        whole = own.new_empty(rows, *own.shape[1:])
        whole[self.rows(0, rows)] = own
        for rank in range(1, self.count):
            self._receive(whole[self.rows(rank, rows)], rank, self.reads)
        return whole

    def scatter(self, whole: Tensor | None, own: Tensor) -> None:
        """Fill every rank's rows of a tensor from the whole one, which rank 0 has on the CPU, contiguous."""
        if whole is None:
            part = torch.empty(own.shape, dtype=own.dtype)
            self._receive(part, 0, self.steps)
            own.copy_(part)
            return
        for rank in range(1, self.count):
            self._send(whole[self.rows(rank, len(whole))], rank, self.steps)
        own.copy_(whole[self.rows(0, len(whole))])

    @staticmethod
    def _send(tensor: Tensor, rank: int, group: "dist.ProcessGroup") -> None:
        if tensor.numel():
            dist.send(tensor.reshape(-1).view(torch.uint8), rank, group=group)

    @staticmethod
    def _receive(tensor: Tensor, rank: int, group: "dist.ProcessGroup") -> None:
        if tensor.numel():
            dist.recv(tensor.view(-1).view(torch.uint8), rank, group=group)
