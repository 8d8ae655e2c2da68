"""What each rank computes of a step: its share of the passes, and its rows of the masters."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from roles.policy.causal_model import CausalModel
from roles.ports import ObjectStore
from roles.trainer.dithering import dither
from roles.trainer.learn.learner import (
    Gradients,
    Learner,
    LearnerSettings,
    Pass,
    PassSums,
    StepReport,
    reference_weights,
)
from roles.trainer.learn.optimizer import MASTER, MasterOptimizer
from roles.trainer.learn.sharded.rank_group import RankGroup
from roles.trainer.learn.sharded.sharded_weights import ShardedWeights
from roles.trainer.learn.state_rows import SavedRows, StateRows
from roles.trainer.tensor_shards import RunSync
from roles.trainer.verified_batch import VerifiedGroup

REFERENCE: Final = "reference/"


class RankLearner(Learner):
    """One rank's part of a learner. All ranks call the same methods with the same groups.

    The passes of a step are those of a learner in one process. Pass i is taken by rank i modulo the number of ranks, so
    that the passes of one moment are of similar length. A rank without a pass takes one that has no weight, because the
    others need its weights.

    Attributes:
        tensors: this rank's rows of masters, moments and reference policy, by name; shapes: of the whole tensors.
    """

    def __init__(
        self, model: CausalModel, settings: LearnerSettings, group: RankGroup, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(model, {}, settings, group.device, dtype)
        self.group = group
        self._sharded = ShardedWeights(model, group, dtype, trained=True)
        self._optimizer = MasterOptimizer(self._sharded.shards(), settings.optimizer, group.add)
        self._sharded_reference: Mapping[str, Tensor] = {}
        reference_shards: dict[str, Tensor] = {}
        if settings.loss.has_reference:
            reference = ShardedWeights(model, group, dtype, trained=False)
            self._sharded_reference, reference_shards = reference, reference.shards()
        self.tensors = self._optimizer.tensors | {REFERENCE + name: t for name, t in reference_shards.items()}
        self.shapes = {name: torch.Size(model.shapes[name.partition("/")[2]]) for name in self.tensors}

    def gradients(self, groups: Sequence[VerifiedGroup]) -> Gradients:
        """Compute the gradients of these groups on all ranks; return this rank's rows."""
        self._sharded.forget_gradients()
        figures = super().gradients(groups).figures
        return Gradients(self._sharded.gradients(), figures)

    def update(self, gradients: Gradients) -> StepReport:
        report = super().update(gradients)
        self.group.wait()  # rank 0 may read the others' rows next
        return report

    def _weights(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        return self._sharded, {}

    def _reference_weights(self) -> Mapping[str, Tensor]:
        return self._sharded_reference

    def _take_passes(
        self, weights: Mapping[str, Tensor], reference: Mapping[str, Tensor], passes: Sequence[Pass]
    ) -> list[PassSums]:
        group = self.group
        sums: list[PassSums] = []
        for first in range(0, len(passes), group.count):
            if first + group.rank < len(passes):
                sums += super()._take_passes(weights, reference, [passes[first + group.rank]])
            else:
                samples, _ = passes[first]
                super()._take_passes(weights, reference, [(samples[:1], [0.0])])
        loss, clipped_tokens, divergence, entropy = (
            group.add([math.fsum(column)]) for column in zip((0.0,) * 4, *sums, strict=True)
        )
        return [(loss, clipped_tokens, divergence, entropy)]

    def state_rows(self) -> StateRows:
        """Return this rank's rows of masters and moments."""
        names = [name for name in self.tensors if not name.startswith(REFERENCE)]
        return StateRows({n: self.tensors[n] for n in names}, {n: self.shapes[n] for n in names}, self.group.share)

    async def load(self, state: ObjectStore, saved: SavedRows, run_sync: RunSync) -> None:
        """Load this rank's rows, while all ranks do."""
        await self.state_rows().load(state, saved, run_sync, self.group)
        self._optimizer.set_steps(saved.steps)

    def gather(self, name: str, *, view: bool) -> Tensor | None:
        """Return a whole master (rounded to BF16 for a view) or moment on rank 0, and None on the others."""
        own = self.tensors[name]
        own = own.to(torch.bfloat16) if view else own
        return self.group.gather(own.cpu().contiguous(), self.shapes[name][0])

    def scatter(self, names: Sequence[str], whole: Mapping[str, Tensor] | None, steps: int) -> None:
        """Take over this rank's rows of masters, moments and weights of the reference policy.

        Args:
            whole: the tensors on rank 0, each of the shape and dtype of the whole tensor; None on the others.
            steps: the optimizer steps of the state of which they are a part.
        """
        for name in names:
            self.group.scatter(None if whole is None else whole[name].contiguous(), self.tensors[name])
        self._optimizer.set_steps(steps)
        self.group.wait()

    def take_genesis(self, weights: Mapping[str, Tensor] | None) -> None:
        """Begin with these weights, which rank 0 has; the others give None."""
        reference = None if weights is None else reference_weights(self._settings, weights)
        for prefix, whole in ((MASTER, weights), (REFERENCE, reference)):
            for name in [name for name in self.tensors if name.startswith(prefix)]:
                own, weight = self.tensors[name], name.removeprefix(prefix)
                if whole is None:
                    self.scatter([name], None, 0)
                    continue
                value = whole[weight].to(own.dtype, copy=True).contiguous()
                is_dithered = prefix == MASTER and self._settings.optimizer.dither
                self.scatter([name], {name: dither(weight, value) if is_dithered else value}, 0)
