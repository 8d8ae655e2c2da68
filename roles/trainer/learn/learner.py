"""One optimizer step from groups of rollouts: FP32 masters, a BF16 view, GRPO in between.

The forward pass computes with the *published* weights, the masters rounded to BF16, and the gradient with respect to
them is applied to the masters (straight through the rounding). So the trainer's log-probabilities are those of the
policy that miners
sample and validators check: on fresh rollouts the importance ratio is 1 up to rounding, and what is optimized is what
is served. On a CPU the rounded weights are widened to float32, in which that policy is served there too; rounding costs
1% of a step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from protocol.rollout.filters import EVERY_TOKEN, Filters
from protocol.rollout.sampling import log_probabilities
from roles.policy.sequences import pad, split
from roles.trainer.learn.loss import LossSettings, advantages, entropy, policy_loss
from roles.trainer.learn.optimizer import AdamW, AdamWSettings
from roles.trainer.learn.replay_buffer import TrainingGroup
from roles.trainer.learn.snapshot import Snapshot, SnapshotSource


class PolicyModel(Protocol):
    """The model, as functions of its weights through which gradients flow."""

    def hidden(self, weights: Mapping[str, Tensor], ids: Tensor, mask: Tensor) -> Tensor:
        """Final hidden states [B, S, D] of right-padded ids int64 [B, S], mask bool [B, S]."""

    def logits(self, weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """float32 [..., V] from [..., D]."""


@dataclass(frozen=True)
class LearnerSettings:
    """How a step is taken.

    Attributes:
        temperature: at which rollouts are sampled; filters: through which.
        max_batch_tokens: padded tokens in one forward and backward pass; gradients add up over passes.
    """

    temperature: float = 1.0
    max_batch_tokens: int = 8192
    filters: Filters = EVERY_TOKEN
    loss: LossSettings = field(default_factory=LossSettings)
    optimizer: AdamWSettings = field(default_factory=AdamWSettings)


@dataclass(frozen=True)
class StepReport:
    """What a step did.

    Attributes:
        step: optimizer steps so far, this one included.
        loss: mean over tokens; grad_norm: L2, before clipping.
        mean_reward: over the rollouts used.
        clip_fraction: share of tokens that the clip kept from giving a gradient.
        entropy: mean over tokens, nats, before any filter.
        tokens: completion tokens learned from.
    """

    step: int
    loss: float
    grad_norm: float
    mean_reward: float
    clip_fraction: float
    entropy: float
    tokens: int


@dataclass(frozen=True)
class Checkpoint:
    """A learner at one moment; the copies may be under way."""

    _view: Snapshot
    _state: Snapshot
    _count: dict[str, Tensor]

    def bf16_view(self) -> dict[str, Tensor]:
        """The weights to publish: contiguous BF16 tensors on the CPU; waits for the copy."""
        return self._view.tensors()

    def state(self) -> dict[str, Tensor]:
        """What `restore` takes, as CPU tensors; waits for the copy."""
        return self._state.tensors() | self._count


@dataclass(frozen=True)
class _Sample:
    """One rollout with its share of the group's reward."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    behaviour: Tensor
    advantage: float


class Learner:
    """The policy that is being learned.

    Args:
        model: what the weights mean.
        weights: where learning starts.
        settings: constants.
        device: where it computes.
        dtype: what the BF16 view is widened to for computing; BF16 itself on a GPU.
    """

    def __init__(
        self,
        model: PolicyModel,
        weights: Mapping[str, Tensor],
        settings: LearnerSettings,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._model = model
        self._settings = settings
        self._device = device
        self._dtype = dtype
        self._optimizer = AdamW(weights, settings.optimizer, device)
        self._views = SnapshotSource(self._optimizer.masters, torch.bfloat16)
        self._states = SnapshotSource(self._optimizer.tensors)
        self._copying: tuple[Snapshot, ...] = ()

    @property
    def steps(self) -> int:
        """Optimizer steps taken."""
        return self._optimizer.steps

    def step(self, groups: Sequence[TrainingGroup]) -> StepReport:
        """One step from these groups.

        Raises:
            ValueError: no tokens to learn from, or a gradient that is not finite; nothing has changed.
        """
        samples = [sample for group in groups for sample in _samples(group)]
        tokens = sum(len(sample.completion) for sample in samples)
        if tokens == 0:
            raise ValueError("no tokens to learn from")
        weights = {
            name: master.to(torch.bfloat16).to(self._dtype).requires_grad_()
            for name, master in self._optimizer.masters.items()
        }
        sums = [
            self._backward(weights, [samples[i] for i in batch], tokens)
            for batch in split([len(s.prompt) + len(s.completion) for s in samples], self._settings.max_batch_tokens)
        ]
        loss, clipped, spread = (math.fsum(column) for column in zip(*sums, strict=True))
        gradients = {name: _gradient(weight) for name, weight in weights.items()}
        for snapshot in self._copying:
            snapshot.wait_before_writing()
        rewards = [reward for group in groups for reward in group.rewards]
        return StepReport(
            grad_norm=self._optimizer.step(gradients),
            step=self._optimizer.steps,
            loss=loss / tokens,
            mean_reward=math.fsum(rewards) / len(rewards),
            clip_fraction=clipped / tokens,
            entropy=spread / tokens,
            tokens=tokens,
        )

    def _backward(
        self, weights: Mapping[str, Tensor], samples: Sequence[_Sample], tokens: int
    ) -> tuple[float, float, float]:
        """Add a batch's share of the gradient; sums over its tokens of loss, clipped tokens and entropy."""
        batch = pad([s.prompt for s in samples], [s.completion for s in samples], self._device)
        states = self._model.hidden(weights, batch.ids, batch.mask)[batch.rows, batch.columns]
        logits = self._model.logits(weights, states)
        log_probs = log_probabilities(logits, batch.targets, self._settings.temperature, self._settings.filters)
        behaviour = torch.cat([sample.behaviour for sample in samples]).to(log_probs.device)
        advantage = torch.tensor([s.advantage for s in samples], device=log_probs.device)[batch.rows]
        loss = policy_loss(log_probs, behaviour, advantage, self._settings.loss)
        (loss.value / tokens).backward()  # type: ignore[no-untyped-call]
        spread = entropy(logits.detach(), self._settings.temperature).sum()
        return float(loss.value.detach()), float(loss.clipped), float(spread)

    def bf16_view(self) -> dict[str, Tensor]:
        """The weights to publish: contiguous BF16 tensors on the CPU, the caller's own."""
        return self._optimizer.bf16_view()

    def begin_checkpoint(self) -> "Checkpoint":
        """Copy weights and state of this moment while training goes on. On a GPU the copy before must have been read."""
        self._copying = (self._views.take(), self._states.take())
        return Checkpoint(*self._copying, self._optimizer.count())

    def state(self) -> dict[str, Tensor]:
        """Masters, moments and step count as CPU tensors by name, for a safetensors file."""
        return self._optimizer.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state, bit for bit.

        Raises:
            ValueError: it is not the state of this model; nothing has changed.
        """
        self._optimizer.restore(state)


def _samples(group: TrainingGroup) -> list[_Sample]:
    scores = advantages(torch.tensor(group.rewards, dtype=torch.float32)).tolist()
    rollouts = zip(group.completions, group.logprobs, scores, strict=True)
    return [_Sample(group.prompt, completion, logprobs, score) for completion, logprobs, score in rollouts]


def _gradient(weight: Tensor) -> Tensor:
    """A weight's gradient in float32; zero where nothing depended on it."""
    return torch.zeros_like(weight, dtype=torch.float32) if weight.grad is None else weight.grad.to(torch.float32)
