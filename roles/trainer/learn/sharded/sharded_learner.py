"""A learner on several ranks: rank 0 runs the training process and calls it, the other ranks follow its calls.

Each rank holds some rows of every tensor, so all ranks have to take part in each operation, in the same order. Rank 0
therefore broadcasts a message that names the operation (one of the classes below) and then takes part in it; the other
ranks wait for messages and do what they name. There are two channels, each followed in a thread of its own: steps
change the tensors, and reads (a message is the name of a tensor, and whether it is rounded to BF16) gather them, so
that a version can be written to the disk while the gradients of the next step are computed.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from protocol.digest import Weights
from roles.trainer.learn.learner import Gradients, StepReport
from roles.trainer.learn.optimizer import MASTER, STEPS
from roles.trainer.learn.sharded.rank_group import RankGroup
from roles.trainer.learn.sharded.rank_learner import REFERENCE, RankLearner
from roles.trainer.tensor_shards import TensorSource
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


class ShardedLearner:
    """A PolicyLearner (roles/trainer/learn/policy_learner.py) on several ranks, as rank 0 uses it. Every other rank
    calls `follow_steps` and `follow_reads`.
    """

    def __init__(self, learner: RankLearner, weights: Mapping[str, Tensor]) -> None:
        self._learner = learner
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

    def state_source(self) -> TensorSource:
        """Return masters and moments, each of which is gathered when it is read."""
        sizes = {name: 4 * count for name, count in self._numbers.items()}
        return TensorSource(sizes, lambda names: {name: self._read(name, view=False) for name in names})

    def step(self, groups: Sequence[VerifiedGroup]) -> StepReport:
        return self.update(self.gradients(groups))

    def state(self) -> dict[str, Tensor]:
        tensors = {name: self._read(name, view=False).clone() for name in self._numbers}
        return tensors | {STEPS: torch.tensor(self.steps, dtype=torch.int64)}

    def restore(self, state: Weights, steps: int | None = None) -> None:
        """Take over some of the tensors of a `state_source`, or with no `steps` a whole `state`."""
        if steps is None:
            steps = int(state[STEPS])
            state = {name: tensor for name, tensor in state.items() if name != STEPS}
        learner = self._learner
        for name, tensor in state.items():
            if (
                name not in self._numbers
                or tensor.shape != learner.shapes[name]
                or tensor.dtype != learner.tensors[name].dtype
            ):
                raise ValueError("a saved state of another model or optimizer")
        self._tell(_Restore(tuple(state), steps))
        learner.scatter(tuple(state), state, steps)

    def _read(self, name: str, *, view: bool) -> Tensor:
        group = self._learner.group
        with self._reading:
            group.broadcast(group.reads, (name, view))
            whole = self._learner.gather(name, view=view)
        assert whole is not None
        return whole

    def _tell(self, message: object) -> None:
        group = self._learner.group
        group.broadcast(group.steps, message)


def follow_steps(learner: RankLearner) -> None:
    """Follow the steps of rank 0 on another rank: receive the initial weights, then do what each message names.

    This blocks its thread, and returns when rank 0 has ended and its connection is closed.

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


def follow_reads(learner: RankLearner) -> None:
    """Follow the reads of rank 0 on another rank: send this rank's rows of each tensor that a message names.

    This blocks its thread, and returns when rank 0 has ended and its connection is closed.
    """
    for name, view in _messages(learner.group, learner.group.reads):
        learner.gather(name, view=view)


def _messages(group: RankGroup, channel: "dist.ProcessGroup") -> Iterator[Any]:
    """Yield the messages of rank 0 until its connection is closed."""
    while True:
        try:
            message = group.broadcast(channel)
        except RuntimeError:  # torch has no narrower one for a peer that is gone
            return
        yield message
