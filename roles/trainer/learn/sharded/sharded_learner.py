"""A learner on several ranks: rank 0 runs the training process and calls it, the other ranks follow its calls.

Each rank holds some rows of every tensor, so all ranks have to take part in each operation, in the same order. Rank 0
therefore broadcasts a message that names the operation (one of the classes below) and then takes part in it; the other
ranks wait for messages and do what they name. There are two channels, each followed in a thread of its own: steps
change the tensors, and reads gather them or save them, so that a version and a checkpoint can be written to the disk
while the gradients of the next step are computed. The tensors of a version are gathered one by one, in BF16; masters
and moments are not: each rank writes its rows into the state of its host.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import torch
import trio
from torch import Tensor
from torch import distributed as dist

from protocol.digest import Weights
from roles.ports import ObjectStore
from roles.trainer.learn.checkpoint_files import delete_folders
from roles.trainer.learn.learner import Gradients, StepReport
from roles.trainer.learn.optimizer import MASTER, STEPS
from roles.trainer.learn.sharded.rank_group import RankGroup
from roles.trainer.learn.sharded.rank_learner import REFERENCE, RankLearner
from roles.trainer.learn.state_rows import SavedRows
from roles.trainer.tensor_shards import SHARD_BYTES, RunSync, TensorSource
from roles.trainer.verified_batch import VerifiedGroup


@dataclass(frozen=True)
class _Gradients:
    """Compute the gradients of these groups."""

    groups: tuple[VerifiedGroup, ...]


@dataclass(frozen=True)
class _Update:
    """Take an optimizer step with the gradients that were computed last."""


@dataclass(frozen=True)
class _Restore:
    """Take over tensors of a saved state, of which rank 0 sends each rank its rows."""

    names: tuple[str, ...]
    steps: int


@dataclass(frozen=True)
class _Load:
    """Take over a saved state."""

    saved: SavedRows


@dataclass(frozen=True)
class _Read:
    """Send the rows of a tensor, rounded to BF16 or as they are."""

    name: str
    is_view: bool


@dataclass(frozen=True)
class _Save:
    """Write all rows below a folder, and keep of what was saved before only another folder."""

    folder: str
    previous: str


class ShardedLearner:
    """A PolicyLearner (roles/trainer/learn/policy_learner.py) on several ranks, as rank 0 uses it. Every other rank
    calls `follow`.

    Args:
        local_ranks: how many ranks, the first ones, are on this host and share its state; None for all.
    """

    def __init__(self, learner: RankLearner, weights: Mapping[str, Tensor], local_ranks: int | None = None) -> None:
        self._learner = learner
        self._local_ranks = local_ranks or learner.group.count
        self._reading = Lock()
        learner.take_genesis(weights)
        moments_and_masters = {name: shape for name, shape in learner.shapes.items() if not name.startswith(REFERENCE)}
        self._numbers = {name: shape.numel() for name, shape in moments_and_masters.items()}

    @property
    def steps(self) -> int:
        return self._learner.steps

    @property
    def parameters(self) -> int:
        return sum(count for name, count in self._numbers.items() if name.startswith(MASTER))

    def gradients(self, groups: Sequence[VerifiedGroup]) -> Gradients:
        """Return the gradients of rank 0's rows."""
        self._tell(_Gradients(tuple(groups)))
        return self._learner.gradients(groups)

    def update(self, gradients: Gradients) -> StepReport:
        self._tell(_Update())
        return self._learner.update(gradients)

    def view_source(self) -> TensorSource:
        """Return the weights to publish, each of which is gathered when it is read."""
        sizes = {name.removeprefix(MASTER): 2 * n for name, n in self._numbers.items() if name.startswith(MASTER)}
        return TensorSource(sizes, lambda names: {name: self._read(MASTER + name, view=True) for name in names})

    async def save(
        self, state: ObjectStore, run_sync: RunSync, shard_bytes: int, folder: str, previous: str
    ) -> tuple[list[int], int]:
        group = self._learner.group
        await run_sync(group.broadcast, group.reads, _Save(folder, previous))
        files = await self._learner.state_rows().save(state, folder, run_sync, shard_bytes)
        return await run_sync(group.exchange, files, group.reads), self._local_ranks

    async def load(self, state: ObjectStore, saved: SavedRows, run_sync: RunSync) -> None:
        await run_sync(self._tell, _Load(saved))
        await self._learner.load(state, saved, run_sync)

    def step(self, groups: Sequence[VerifiedGroup]) -> StepReport:
        return self.update(self.gradients(groups))

    def state(self) -> dict[str, Tensor]:
        tensors = {name: self._read(name, view=False).clone() for name in self._numbers}
        return tensors | {STEPS: torch.tensor(self.steps, dtype=torch.int64)}

    def restore(self, state: Weights) -> None:
        """Take over a whole `state`."""
        learner, steps = self._learner, int(state[STEPS])
        tensors = {name: tensor for name, tensor in state.items() if name != STEPS}
        for name, tensor in tensors.items():
            if (
                name not in self._numbers
                or tensor.shape != learner.shapes[name]
                or tensor.dtype != learner.tensors[name].dtype
            ):
                raise ValueError("a saved state of another model or optimizer")
        self._tell(_Restore(tuple(tensors), steps))
        learner.scatter(tuple(tensors), tensors, steps)

    def _read(self, name: str, *, view: bool) -> Tensor:
        group = self._learner.group
        with self._reading:
            group.broadcast(group.reads, _Read(name, view))
            whole = self._learner.gather(name, view=view)
        assert whole is not None
        return whole

    def _tell(self, message: object) -> None:
        group = self._learner.group
        group.broadcast(group.steps, message)


async def follow(learner: RankLearner, state: ObjectStore, *, sweeps: bool = False) -> None:
    """Do on another rank what rank 0 does, until it has ended and its connection is closed.

    Args:
        state: of this host.
        sweeps: whether this rank deletes what was saved before, as one rank of each host but the first does.
    """
    in_thread = partial(trio.to_thread.run_sync, abandon_on_cancel=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(in_thread, _follow_reads, learner, state, sweeps)
        await in_thread(_follow_steps, learner, state)
        nursery.cancel_scope.cancel()


def _follow_steps(learner: RankLearner, state: ObjectStore) -> None:
    """Receive the initial weights, then do what each message of the channel of steps names.

    Errors that rank 0 has as well (groups without tokens, gradients that are not finite) are not raised here: they
    change nothing on any rank, and rank 0 raises them to its caller.
    """
    learner.take_genesis(None)
    gradients: Gradients | None = None  # that the next update uses; None after an update, or where there were none
    for message in _messages(learner.group, learner.group.steps):
        match message:
            case _Gradients(groups):
                gradients = None
                with suppress(ValueError):
                    gradients = learner.gradients(groups)
            case _Update():
                assert gradients is not None
                with suppress(ValueError):
                    learner.update(gradients)
                gradients = None
            case _Restore(names, steps):
                learner.scatter(names, None, steps)
            case _Load(saved):
                trio.from_thread.run(learner.load, state, saved, trio.to_thread.run_sync)


def _follow_reads(learner: RankLearner, state: ObjectStore, sweeps: bool) -> None:
    """Do what each message of the channel of reads names."""
    group = learner.group
    for message in _messages(group, group.reads):
        match message:
            case _Read(name, is_view):
                learner.gather(name, view=is_view)
            case _Save(folder, previous):
                if sweeps:
                    trio.from_thread.run(delete_folders, state, {folder, previous})
                save = learner.state_rows().save
                files = trio.from_thread.run(save, state, folder, trio.to_thread.run_sync, SHARD_BYTES)
                group.exchange(files, group.reads)


def _messages(group: RankGroup, channel: "dist.ProcessGroup") -> Iterator[Any]:
    """Yield the messages of rank 0 until its connection is closed."""
    while True:
        try:
            message = group.broadcast(channel)
        except RuntimeError:  # torch has no narrower one for a peer that is gone
            return
        yield message
