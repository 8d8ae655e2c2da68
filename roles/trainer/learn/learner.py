"""One optimizer step from groups of rollouts: FP32 masters, a BF16 view, GRPO in between.

The forward pass computes with the *published* weights, which are the masters rounded to BF16, and the gradient with
respect to them is applied to the masters (straight through the rounding). So the trainer's log-probabilities are those
of the policy that miners sample and validators check: on fresh rollouts the importance ratio is 1 up to rounding, and
the policy that is optimized is the one that is served. On a CPU the rounded weights are widened to float32, as for
serving there; rounding costs 1% of a step.
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
from roles.trainer.learn.snapshot import Snapshot, SnapshotSource
from roles.trainer.verified_batch import VerifiedGroup


class PolicyModel(Protocol):
    """A model as functions of its weights, through which gradients flow."""

    def hidden(self, weights: Mapping[str, Tensor], ids: Tensor, mask: Tensor) -> Tensor:
        """Return the final hidden states [B, S, D] of right-padded ids int64 [B, S] with mask bool [B, S]."""

    def logits(self, weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """Return logits float32 [..., V] of hidden states [..., D]."""


@dataclass(frozen=True)
class LearnerSettings:
    """The constants of a training step.

    Attributes:
        temperature, filters: with which rollouts are sampled.
        max_batch_tokens: padded tokens in one forward and backward pass; gradients add up over passes.
    """

    temperature: float = 1.0
    max_batch_tokens: int = 8192
    filters: Filters = EVERY_TOKEN
    loss: LossSettings = field(default_factory=LossSettings)
    optimizer: AdamWSettings = field(default_factory=AdamWSettings)


@dataclass(frozen=True)
class StepReport:
    """The figures of one training step.

    Attributes:
        step: optimizer steps so far, this one included.
        loss: mean over tokens; grad_norm: L2 norm before clipping.
        mean_reward: mean over the rollouts of the step.
        clip_fraction: share of tokens that gave no gradient because of the clip.
        entropy: mean over tokens, nats, before any filter.
        tokens: completion tokens of the step.
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
    """A copy of a learner's weights and state; copying may not have finished yet."""

    _view: Snapshot
    _state: Snapshot
    _count: dict[str, Tensor]

    def bf16_view(self) -> dict[str, Tensor]:
        """Wait for the copy, and return the weights to publish: contiguous BF16 tensors on the CPU."""
        return self._view.tensors()

    def state(self) -> dict[str, Tensor]:
        """Wait for the copy, and return the state for `Learner.restore`: tensors on the CPU."""
        return self._state.tensors() | self._count


@dataclass(frozen=True)
class _Sample:
    """One rollout of a step.

    Attributes:
        behaviour: float32 [T], log-probabilities under the policy that sampled it.
        advantage: of its reward within its group.
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    behaviour: Tensor
    advantage: float


class Learner:
    """The policy in training.

    Args:
        model: the functions of the weights.
        weights: the initial weights.
        settings: constants.
        device: where it computes.
        dtype: to which the BF16 view is widened for computing; BF16 itself on a GPU.
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
        self._snapshots: tuple[Snapshot, ...] = ()  # the newest, which may still be copying

    @property
    def steps(self) -> int:
        """Optimizer steps taken."""
        return self._optimizer.steps

    def step(self, groups: Sequence[VerifiedGroup]) -> StepReport:
        """Take one optimizer step with these groups.

        Raises:
            ValueError: the groups have no tokens, or a gradient is not finite; nothing has changed.
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
        loss, clipped_tokens, entropy_sum = (math.fsum(column) for column in zip(*sums, strict=True))
        gradients = {name: _gradient(weight) for name, weight in weights.items()}
        for snapshot in self._snapshots:
            snapshot.wait_before_writing()
        rewards = [reward for group in groups for reward in group.rewards]
        return StepReport(
            grad_norm=self._optimizer.step(gradients),
            step=self._optimizer.steps,
            loss=loss / tokens,
            mean_reward=math.fsum(rewards) / len(rewards),
            clip_fraction=clipped_tokens / tokens,
            entropy=entropy_sum / tokens,
            tokens=tokens,
        )

    def _backward(
        self, weights: Mapping[str, Tensor], samples: Sequence[_Sample], tokens: int
    ) -> tuple[float, float, float]:
        """Add a batch's part of the gradient; return the sums over its tokens of loss, clipped tokens and entropy."""
        batch = pad([s.prompt for s in samples], [s.completion for s in samples], self._device)
        states = self._model.hidden(weights, batch.ids, batch.mask)[batch.rows, batch.columns]
        logits = self._model.logits(weights, states)
        log_probs = log_probabilities(logits, batch.targets, self._settings.temperature, self._settings.filters)
        behaviour = torch.cat([sample.behaviour for sample in samples]).to(log_probs.device)
        advantage = torch.tensor([s.advantage for s in samples], device=log_probs.device)[batch.rows]
        loss = policy_loss(log_probs, behaviour, advantage, self._settings.loss)
        (loss.value / tokens).backward()  # type: ignore[no-untyped-call]
        entropy_sum = entropy(logits.detach(), self._settings.temperature).sum()
        return float(loss.value.detach()), float(loss.clipped_tokens), float(entropy_sum)

    def bf16_view(self) -> dict[str, Tensor]:
        """Return the weights to publish: contiguous BF16 tensors on the CPU, which belong to the caller."""
        return self._optimizer.bf16_view()

    def begin_checkpoint(self) -> "Checkpoint":
        """Start to copy the present weights and state, while training goes on.

        On a GPU the previous checkpoint must have been read, because its memory is used again.
        """
        self._snapshots = (self._views.take(), self._states.take())
        return Checkpoint(*self._snapshots, self._optimizer.count())

    def state(self) -> dict[str, Tensor]:
        """Return masters, moments and step count as CPU tensors by name, for a safetensors file."""
        return self._optimizer.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state, bit for bit.

        Raises:
            ValueError: it is not a state of this model; nothing has changed.
        """
        self._optimizer.restore(state)


def _samples(group: VerifiedGroup) -> list[_Sample]:
    prompt = group.prompt_tokens
    group_advantages = advantages(torch.tensor(group.rewards, dtype=torch.float32)).tolist()
    return [
        _Sample(prompt, completion, torch.from_numpy(logprobs.copy()), advantage)
        for completion, logprobs, advantage in zip(
            group.completion_tokens, group.completion_logprobs, group_advantages, strict=True
        )
    ]


def _gradient(weight: Tensor) -> Tensor:
    """Return a weight's gradient in float32; zeros if the loss does not depend on the weight."""
    return torch.zeros_like(weight, dtype=torch.float32) if weight.grad is None else weight.grad.to(torch.float32)
