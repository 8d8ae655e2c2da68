"""What the training process asks of a learner: one in this process (learner.py), or on several ranks (sharded/)."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from roles.trainer.learn.learner import Gradients, StepReport
from roles.trainer.tensor_shards import TensorSource
from roles.trainer.verified_batch import VerifiedGroup


class PolicyLearner(Protocol):
    """The policy in training. Sources may be read while gradients are computed, and not during an update."""

    @property
    def steps(self) -> int:
        """Optimizer steps taken."""

    @property
    def parameters(self) -> int:
        """Number of weights."""

    def gradients(self, groups: Sequence[VerifiedGroup]) -> Gradients:
        """Return the gradients of the loss of these groups. Masters and moments are only read."""

    def update(self, gradients: Gradients) -> StepReport:
        """Change masters and moments by the gradients that were computed last.

        Raises:
            ValueError: a gradient is not finite; nothing has changed.
        """

    def view_source(self) -> TensorSource:
        """Return the weights to publish: BF16, each whole."""

    def state_source(self) -> TensorSource:
        """Return masters and moments, each whole, whatever the number of ranks."""

    def restore(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Take over some of the tensors of a `state_source`.

        Raises:
            ValueError: they are not tensors of this model; nothing has changed.
        """
