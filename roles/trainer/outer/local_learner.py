"""The narrow interface between a learner and the outer optimizer: a learner is a state and a step.

`roles.trainer.learn.learner.Learner` has it. What its state has is in protocol/outer/local_work.py.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from roles.trainer.verified_batch import VerifiedGroup


class StepFigures(Protocol):
    """The figures of a local step that a site reports: the gradient's L2 norm is that before clipping."""

    @property
    def loss(self) -> float: ...

    @property
    def grad_norm(self) -> float: ...

    @property
    def reward(self) -> float: ...


class LocalLearner(Protocol):
    """What takes the local steps of a site."""

    def step(self, groups: Sequence[VerifiedGroup]) -> StepFigures:
        """Take one optimizer step.

        Raises:
            ValueError: a gradient is not finite; nothing has changed.
        """

    def state(self) -> dict[str, Tensor]:
        """Return masters and everything else by name: CPU tensors that nobody else changes."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state."""
