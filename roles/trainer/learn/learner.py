"""One optimizer step from groups of rollouts: FP32 masters, their published view, GRPO in between.

The forward pass computes with the *published* weights, which are the masters rounded to BF16, or quantized, and the
gradient with respect to them is applied to the masters (straight through the rounding). So the trainer's
log-probabilities are those of the policy that miners sample and validators check: on fresh rollouts the importance
ratio is 1 up to rounding, and the policy that is optimized is the one that is served. On a CPU the rounded weights are
widened to float32, as for serving there; rounding to BF16 costs 1% of a step.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from protocol.digest import dtypes
from protocol.outer.dithering import dither
from protocol.quantization import Precision, is_matrix, published_outline, published_tensors, row_scales
from protocol.rollout.sampling import SamplingParams, log_probabilities
from roles.policy.causal_model import CausalModel
from roles.policy.layer_weights import compute_part
from roles.policy.sequences import TokenBatch, split_for_training, split_packed, to_batch
from roles.ports import ObjectStore
from roles.trainer.learn.loss.loss_settings import AdvantageName, LossSettings
from roles.trainer.learn.loss.policy_loss import AGGREGATIONS, advantages, entropy, policy_loss
from roles.trainer.learn.loss.surrogates import Tokens
from roles.trainer.learn.optimizer import MasterOptimizer
from roles.trainer.learn.rounded_weights import RoundedWeights, rounded
from roles.trainer.learn.state_rows import Peers, SavedRows, Share, StateRows
from roles.trainer.learn.training_settings import OptimizerSettings
from roles.trainer.tensor_shards import RunSync, TensorSource, WrittenWeights
from roles.trainer.verified_batch import VerifiedGroup

_PLAIN_SAMPLING = SamplingParams(temperature=1.0, max_tokens=2048, stops=())


@dataclass(frozen=True)
class LearnerSettings:
    """The constants of a training step."""

    sampling: SamplingParams = _PLAIN_SAMPLING  # of the rollouts
    max_batch_tokens: int = 8192  # tokens with pads in one forward and backward pass; gradients add up over passes
    ranks: int = 1  # processes among which the passes of a step are dealt
    logits_chunk: int = 1024  # tokens whose logits are in memory at once; a pass with more computes the logits twice
    packing: bool = False  # put the rollouts of a pass into one row without pads; only if its model can
    loss: LossSettings = field(default_factory=LossSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    read_reference: Callable[[], Mapping[str, Tensor]] | None = None  # the weights of the reference; None: version 0


@dataclass(frozen=True)
class StepReport:
    """The figures of one training step."""

    step: int  # optimizer steps so far, this one included
    loss: float  # as the loss weighs tokens
    grad_norm: float  # L2 norm before clipping
    reward: float  # mean over the rollouts of the step
    clipped: float  # share of tokens whose importance ratio was out of bounds
    entropy: float  # mean over tokens, nats, before any filter
    divergence: float  # mean over tokens of the divergence from the reference policy, nats; 0 without one
    overlong: float  # share of the rollouts that the step left out because they were cut off
    tokens: int  # completion tokens that the step learned from
    learning_rate: float


@dataclass(frozen=True)
class Gradients:
    """The gradients of one step, by name, in the dtype in which the learner computes; none after the update. The
    figures are those of the step as far as they are known before the update.
    """

    tensors: dict[str, Tensor]
    figures: StepReport


@dataclass(frozen=True)
class _Sample:
    """One rollout of a step."""

    prompt: tuple[int, ...]
    sequence: tuple[int, ...]  # all tokens behind the prompt
    drawn: tuple[bool, ...]  # which of them the policy drew: only these have a part in the loss
    behaviour: Tensor  # float32 [T], log-probabilities of these under the policy that sampled them
    advantage: float

    @property
    def length(self) -> int:
        """Tokens that the policy drew."""
        return len(self.behaviour)


Pass = tuple[Sequence[_Sample], Sequence[float]]
"""The samples of one forward and backward pass, and the weight in the loss of each one's tokens."""

PassSums = tuple[float, float, float, float]
"""The loss of a pass, and its sums over tokens of clipped tokens, divergence and entropy."""


class Learner:
    """The policy in training. It may be read and saved while gradients are computed, and not during an update.

    The reference policy of a loss with a KL coefficient has the initial weights for ever. The published weights have
    `precision`; to compute, they are widened to `dtype`: BF16 itself on a GPU.
    """

    def __init__(
        self,
        model: CausalModel,
        weights: Mapping[str, Tensor],
        settings: LearnerSettings,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        precision: Precision = "bf16",
    ) -> None:
        self._model = model
        self._settings = settings
        self._device = device
        self._dtype = dtype
        self._precision = precision
        self._peers: Peers | None = None
        masters = {name: self._first_master(name, tensor.detach().to(device)) for name, tensor in weights.items()}
        self._optimizer = MasterOptimizer(masters, settings.optimizer)
        self._shapes = {name: master.shape for name, master in masters.items()}
        reference = reference_weights(settings, weights) if weights else {}  # if the loss needs one
        self._reference = {n: self._reference_weight(n, tensor.detach().to(device)) for n, tensor in reference.items()}

    def _first_master(self, name: str, weight: Tensor) -> Tensor:
        """Return the FP32 master with which the training of a weight begins: a tensor of its own."""
        master = weight.to(torch.float32, copy=True).contiguous()
        return dither(name, master) if self._settings.optimizer.dither and self._precision == "bf16" else master

    def _reference_weight(self, name: str, weight: Tensor) -> Tensor:
        """Return a weight of the reference policy: BF16, as it would be published."""
        return rounded(name, weight, self._precision, torch.bfloat16).clone()

    @property
    def steps(self) -> int:
        """Optimizer steps taken."""
        return self._optimizer.steps

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(shape.numel() for shape in self._shapes.values())

    def step(self, groups: Sequence[VerifiedGroup]) -> StepReport:
        return self.update(self.gradients(groups))

    def gradients(self, groups: Sequence[VerifiedGroup]) -> Gradients:
        """Return the gradients of the loss of these groups. Masters and moments are only read."""
        samples = [sample for group in groups for sample in _samples(group, self._settings.loss.advantage_name)]
        completions = len(samples)
        if self._settings.loss.overlong_filtering:
            samples = [sample for sample in samples if not self._is_cut_off(sample)]
        tokens = sum(sample.length for sample in samples)
        if tokens == 0:
            raise ValueError("no tokens to learn from")
        lengths = [sample.length for sample in samples]
        weight_of_tokens = AGGREGATIONS[self._settings.loss.aggregation_name](
            lengths, self._settings.sampling.max_tokens
        )
        weights, leaves = self._weights()
        sizes = [len(sample.prompt) + len(sample.sequence) for sample in samples]
        split_samples = split_packed if self._settings.packing else split_for_training
        passes = [
            ([samples[i] for i in batch], [weight_of_tokens[i] for i in batch])
            for batch in split_samples(sizes, self._settings.max_batch_tokens, self._settings.ranks)
        ]
        sums = self._take_passes(weights, self._reference_weights(), passes)
        loss, clipped_tokens, divergence, entropy_sum = (math.fsum(column) for column in zip(*sums, strict=True))
        rewards = [reward for group in groups for reward in group.rewards]
        figures = StepReport(
            step=self._optimizer.steps + 1,
            loss=loss,
            grad_norm=0.0,
            reward=math.fsum(rewards) / len(rewards),
            clipped=clipped_tokens / tokens,
            entropy=entropy_sum / tokens,
            divergence=divergence / tokens,
            overlong=1 - len(samples) / completions,
            tokens=tokens,
            learning_rate=0.0,
        )
        return Gradients(
            {  # zeros if the loss does not depend on a weight
                name: torch.zeros_like(leaf, requires_grad=False) if leaf.grad is None else leaf.grad
                for name, leaf in leaves.items()
            },
            figures,
        )

    def _weights(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Return the rounded weights of a step, and the tensors in which their gradients add up."""
        masters = self._optimizer.masters
        if self._dtype == torch.float32:
            leaves = {name: master.detach().requires_grad_() for name, master in masters.items()}
            return RoundedWeights(leaves, self._precision), leaves
        leaves = {
            name: rounded(name, master, self._precision, self._dtype).requires_grad_()
            for name, master in masters.items()
        }
        return leaves, leaves

    def _reference_weights(self) -> Mapping[str, Tensor]:
        """Return the weights of the reference policy; empty for a loss without one."""
        return {name: tensor.to(self._dtype) for name, tensor in self._reference.items()}

    def _take_passes(
        self, weights: Mapping[str, Tensor], reference: Mapping[str, Tensor], passes: Sequence[Pass]
    ) -> list[PassSums]:
        """Add the gradients of all passes; return their sums."""
        return [self._backward(weights, reference, *one) for one in passes]

    def update(self, gradients: Gradients) -> StepReport:
        """Change masters and moments by gradients of the present masters; ValueError if one is not finite, and nothing
        has changed. The gradients are dropped here, since to give their memory back takes long on an event loop.
        """
        try:
            norm = self._optimizer.step(gradients.tensors)
        finally:
            gradients.tensors.clear()
        return replace(gradients.figures, grad_norm=norm, learning_rate=self._optimizer.learning_rate)

    def _is_cut_off(self, sample: _Sample) -> bool:
        """Return whether a completion has the longest length and no end."""
        sampling = self._settings.sampling
        return sample.length >= sampling.max_tokens and sample.sequence[-1] not in sampling.stops

    def _backward(
        self,
        weights: Mapping[str, Tensor],
        reference: Mapping[str, Tensor],
        samples: Sequence[_Sample],
        token_weights: Sequence[float],
    ) -> PassSums:
        """Add a batch's part of the gradient, by the weight in the loss of each sample's tokens; `reference` may be
        empty.
        """
        batch = to_batch(
            [sample.prompt for sample in samples],
            [sample.sequence for sample in samples],
            self._device,
            [sample.drawn for sample in samples],
            packed=self._settings.packing,
        )
        states = self._states_of(weights, batch)
        reference_log_probs = None
        if reference:
            with torch.no_grad():
                reference_log_probs, _ = self._statistics(reference, self._states_of(reference, batch), batch.targets)
        device = states.device
        behaviour = torch.cat([sample.behaviour for sample in samples]).to(device)
        advantage = torch.tensor([s.advantage for s in samples], device=device)[batch.owners]
        weight = torch.tensor(token_weights, device=device)[batch.owners]
        log_probs, entropies = self._statistics(weights, states, batch.targets)
        # a step is the only one on its groups, so the policy before it is the present one
        proximal = log_probs.detach()
        tokens = Tokens(log_probs, behaviour, proximal, advantage, batch.owners, entropies, reference_log_probs)
        loss = policy_loss(tokens, weight, self._settings.loss)
        loss.value.backward()  # type: ignore[no-untyped-call]
        return float(loss.value.detach()), float(loss.clipped_tokens), loss.divergence, float(entropies.detach().sum())

    def _states_of(self, weights: Mapping[str, Tensor], batch: TokenBatch) -> Tensor:
        """Return the state from which each completion token is drawn: [N, D]."""
        states: Tensor = compute_part(weights, "", self._model.hidden, weights, batch.ids, batch.mask)
        return states[batch.rows, batch.columns]

    def _statistics(self, weights: Mapping[str, Tensor], states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each token, with gradient, and the entropy before it, with gradient if the loss
        depends on it: float32 [N] each. If there are more tokens than a chunk has, only the logits of one chunk are in
        memory at a time: they are computed again for their gradient.
        """
        size = self._settings.logits_chunk
        if len(states) <= size:
            return self._chunk_statistics(weights, states, targets)
        if isinstance(weights, RoundedWeights):
            weights = weights.adding_in_place()
        parts = [
            checkpoint(self._chunk_statistics, weights, part, tokens, use_reentrant=False, preserve_rng_state=False)
            for part, tokens in zip(states.split(size), targets.split(size), strict=True)  # type: ignore[no-untyped-call]
        ]
        log_probs, entropies = zip(*parts, strict=True)
        return torch.cat(log_probs), torch.cat(entropies)

    def _chunk_statistics(
        self, weights: Mapping[str, Tensor], states: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits = self._model.logits(weights, states)
        of_entropy = logits if self._settings.loss.entropy_coefficient else logits.detach()
        sampling = self._settings.sampling
        log_probs = log_probabilities(logits, targets, sampling.temperature, sampling.filters)
        return log_probs, entropy(of_entropy, sampling.temperature)

    def view(self) -> dict[str, Tensor]:
        """Return the tensors to publish: contiguous, on the CPU; they belong to the caller."""
        source = self.view_source()
        return dict(source.read(tuple(source.sizes)))

    def view_source(self) -> TensorSource:
        """Return the tensors to publish, which are rounded when they are read. No update may run meanwhile."""
        outline = published_outline(self._precision, self._shapes)
        sizes = {name: dtypes[dtype].itemsize * math.prod(shape) for name, (dtype, shape) in outline.items()}
        return TensorSource(sizes, self._published)

    def _published(self, names: Sequence[str]) -> dict[str, Tensor]:
        return published_tensors(self._optimizer.masters, self._precision, names)

    def state_rows(self) -> StateRows:
        """Return masters and moments as rows of which this process has all."""
        tensors = self._optimizer.tensors
        return StateRows(tensors, {name: tensor.shape for name, tensor in tensors.items()}, Share())

    async def put_version(self, state: ObjectStore, folder: str, run_sync: RunSync, shard_bytes: int) -> WrittenWeights:
        """Write the tensors to publish into a folder, on several hosts each a range of the files."""
        return await self.view_source().put_version(state, folder, run_sync, shard_bytes)

    async def save(
        self, state: ObjectStore, run_sync: RunSync, shard_bytes: int, folder: str, previous: str
    ) -> tuple[list[int], int]:
        """Write masters and moments below a folder: each rank its own rows, into the state of its host, where the
        folder before stays until the next call. Return how many files each rank has written, and how many ranks, the
        first ones, share this state. ValueError: a weight can have no scale, so no version can be made; nothing is
        written.
        """
        await run_sync(self._scales)
        return [await self.state_rows().save(state, folder, run_sync, shard_bytes)], 1

    def _scales(self) -> dict[str, Tensor]:
        """Return the scales of this process's rows of quantized matrices; ValueError if a weight can have none."""
        masters = self._optimizer.masters.items() if self._precision != "bf16" else ()
        return {name: row_scales(rows, self._precision) for name, rows in masters if is_matrix(name, rows.shape)}

    async def load(self, state: ObjectStore, saved: SavedRows, run_sync: RunSync) -> None:
        """Go on from what any number of ranks has saved; StateError for another model's, or if a part is on no host."""
        await self.state_rows().load(state, saved, run_sync, self._peers)
        self._optimizer.steps = saved.steps

    def state(self) -> dict[str, Tensor]:
        """Return copies of masters, moments and step count by name, for a state that is changed and restored."""
        return self._optimizer.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over a whole `state`."""
        self._optimizer.restore(state)


def reference_weights(settings: LearnerSettings, first: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the weights of the reference policy, given those of version 0; none if the loss needs none."""
    if not settings.loss.has_reference:
        return {}
    return first if settings.read_reference is None else settings.read_reference()


def _samples(group: VerifiedGroup, advantage: AdvantageName) -> list[_Sample]:
    prompt = group.prompt_tokens
    group_advantages = advantages(torch.tensor(group.rewards, dtype=torch.float32), advantage).tolist()
    return [
        _Sample(prompt, *sequence, torch.from_numpy(logprobs.copy()), advantage)
        for sequence, logprobs, advantage in zip(
            group.sequences, group.completion_logprobs, group_advantages, strict=True
        )
        if logprobs.size
    ]
