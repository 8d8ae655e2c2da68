"""What the training process asks of a learner: one in this process (learner.py), or on several ranks (sharded/)."""

from collections.abc import Sequence
from typing import Protocol

from roles.ports import ObjectStore
from roles.trainer.learn.learner import Gradients, StepReport
from roles.trainer.learn.state_rows import SavedRows
from roles.trainer.tensor_shards import RunSync, TensorSource
from roles.trainer.verified_batch import VerifiedGroup


class PolicyLearner(Protocol):
    """The policy in training. It may be read and saved while gradients are computed, and not during an
    update."""

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

    async def save(
        self, state: ObjectStore, run_sync: RunSync, shard_bytes: int, folder: str, previous: str
    ) -> tuple[list[int], int]:
        """Write masters and moments below a folder: each rank its own rows, into the state of its host.

        Args:
            previous: the folder that was saved before, which ranks on other hosts keep until the next call.

        Returns:
            How many files each rank has written, and how many ranks, the first ones, share this state.
        """

    async def load(self, state: ObjectStore, saved: SavedRows, run_sync: RunSync) -> None:
        """Go on from what any number of ranks has saved.

        Raises:
            StateError: it is that of another model or optimizer, or a part of it is on no host.
        """
