"""How the ranks of a trainer on several GPUs meet, and what those other than rank 0 do.

The ranks of one host meet through a file, and talk over the loopback interface alone: torch.distributed knows no
passwords. So ranks on several hosts need a network that nobody else is on.
"""

from functools import partial

import torch
import trio
from torch import distributed as dist

from grailnode.engine.compute import Compute
from grailnode.node.process_launch import Seat
from roles.trainer.learn.learner import LearnerSettings
from roles.trainer.learn.sharded.rank_group import RankGroup
from roles.trainer.learn.sharded.rank_learner import RankLearner
from roles.trainer.learn.sharded.sharded_learner import follow_reads, follow_steps


def join_ranks(seat: Seat, device: str) -> RankGroup:
    """Return the group of all ranks, when all of them have called this; the device is "cpu" or "cuda"."""
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=seat.meeting, rank=seat.rank, world_size=seat.count)
    return RankGroup.of(torch.device(device))


async def follow(compute: Compute, settings: LearnerSettings, seat: Seat) -> None:
    """Take part in what rank 0 computes, on another rank, until rank 0 has ended."""

    def make_learner() -> RankLearner:
        return RankLearner(compute.model, settings, join_ranks(seat, compute.device), compute.dtype)

    learner = await trio.to_thread.run_sync(make_learner, abandon_on_cancel=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(trio.to_thread.run_sync, follow_reads, learner, abandon_on_cancel=True))
        await trio.to_thread.run_sync(follow_steps, learner, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()
