"""The loss of a step, chosen by name: a weighted sum over tokens of a surrogate objective and, if wanted, a divergence.

    name        objective of a token    weight of a token       advantage       source
    grpo        clipped ratio           1 / (C |y|)             standardized    PULSE, equation 23
    token-mean  clipped ratio           1 / tokens of the step  standardized    DAPO
    dr-grpo     clipped ratio           1 / (C max_tokens)      centered        Dr. GRPO
    gspo        clipped sequence ratio  1 / (C |y|)             standardized    GSPO
    cispo       clipped weight          1 / tokens of the step  standardized    CISPO

C is the number of completions of the step, and |y| the tokens of the completion.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from roles.trainer.learn.loss.loss_settings import LARGEST_LOG_RATIO, AdvantageName, LossName, LossSettings
from roles.trainer.learn.loss.surrogates import Surrogate, sampled_weight, sequence_ratio, token_ratio

TokenWeights = Callable[[Sequence[int], int], list[float]]
"""A function of the lengths of all completions of a step, in tokens, of which there is at least one, and of the longest
completion that the run allows. It returns the weight of each token of each completion: one number for each completion.

A weight depends on the lengths alone, so it is known before the first pass of the model: gradients that add up over
several passes are those of one pass.
"""


def token_mean(lengths: Sequence[int], max_tokens: int) -> list[float]:
    """Return weights for the mean over all tokens of the step: a token of a long completion weighs as much as one of a
    short one (DAPO, Yu et al. 2025).
    """
    return [1 / sum(lengths)] * len(lengths)


def sequence_mean(lengths: Sequence[int], max_tokens: int) -> list[float]:
    """Return weights for the mean over completions of the mean over each one's tokens (equation 23)."""
    return [1 / (len(lengths) * length) if length else 0.0 for length in lengths]


def constant_length(lengths: Sequence[int], max_tokens: int) -> list[float]:
    """Return weights for the sum over tokens divided by a constant length, and the mean over completions (Dr. GRPO,
    Liu et al. 2025): the length of a completion does not bias its gradient.
    """
    return [1 / (len(lengths) * max_tokens)] * len(lengths)


_MIN_DEVIATION: Final = 1e-6
"""Rewards with a smaller standard deviation do not tell which rollout was better."""


def advantages(rewards: Tensor, name: AdvantageName = "standardized") -> Tensor:
    """Compute the advantages of the rollouts of one group (PULSE, equation 25).

    Args:
        rewards: float32 [R].
        name: whether to divide by the population's standard deviation.

    Returns:
        float32 [R]; all zero if the rewards do not differ.
    """
    deviation = rewards.std(correction=0)
    if deviation < _MIN_DEVIATION:
        return torch.zeros_like(rewards)
    centered = rewards - rewards.mean()
    return centered / deviation if name == "standardized" else centered


def reference_divergence(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimate D_KL(pi_theta || pi_ref) of equation 23 at each token as exp(d) - d - 1, d being the difference
    log pi_ref - log pi_theta.

    The estimator is never negative, and unbiased for tokens that pi_theta samples (Schulman 2020, "k3").

    Args:
        log_probs: float32 [N], log pi_theta, with gradient.
        reference: float32 [N], log pi_ref.

    Returns:
        float32 [N], nats.
    """
    difference = (reference - log_probs).clamp(max=LARGEST_LOG_RATIO)
    return difference.exp() - difference - 1


def entropy(logits: Tensor, temperature: float) -> Tensor:
    """Return the entropy of the sampled distribution in nats, float32 [N], of logits [N, V]."""
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return -(log_p.exp() * log_p).sum(dim=-1)


@dataclass(frozen=True)
class Loss:
    """What a loss consists of: see the table above."""

    surrogate: Surrogate
    weights: TokenWeights
    advantage: AdvantageName


LOSSES: Final[dict[LossName, Loss]] = {
    "grpo": Loss(token_ratio, sequence_mean, "standardized"),
    "token-mean": Loss(token_ratio, token_mean, "standardized"),
    "dr-grpo": Loss(token_ratio, constant_length, "centered"),
    "gspo": Loss(sequence_ratio, sequence_mean, "standardized"),
    "cispo": Loss(sampled_weight, token_mean, "standardized"),
}


def advantage_name(settings: LossSettings) -> AdvantageName:
    """Return how advantages are computed."""
    return LOSSES[settings.loss].advantage if settings.advantage == "of-loss" else settings.advantage


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of a batch, and figures for monitoring."""

    value: Tensor  # float32 scalar with a gradient, to be minimized; the losses of a step's batches add up
    clipped_tokens: int  # whose ratio was out of bounds
    divergence: float  # sum over tokens of the divergence from the reference policy, nats; 0 without one


def policy_loss(
    log_probs: Tensor,
    behaviour: Tensor,
    advantage: Tensor,
    rows: Tensor,
    weight: Tensor,
    settings: LossSettings,
    reference: Tensor | None = None,
) -> PolicyLoss:
    """Compute the loss of a batch: -sum_t w_t (objective_t - beta KL_t).

    Args:
        log_probs: float32 [N], log pi_theta of each token, with gradient.
        behaviour: float32 [N], log pi_old of each token, under the policy that sampled it.
        advantage: float32 [N], the advantage of each token's completion.
        rows: int64 [N], the completion of each token, within the batch.
        weight: float32 [N], by the loss's `TokenWeights`.
        reference: float32 [N], log pi_ref of each token; needed for a KL coefficient above 0.

    Raises:
        ValueError: there is a KL coefficient and no reference.
    """
    objective = LOSSES[settings.loss].surrogate(log_probs, behaviour, advantage, rows, settings)
    values, divergence = objective.values, 0.0
    if settings.kl_coefficient:
        if reference is None:
            raise ValueError("a KL coefficient needs the log-probabilities of a reference policy")
        distances = reference_divergence(log_probs, reference)
        values = values - settings.kl_coefficient * distances
        divergence = float(distances.detach().sum())
    return PolicyLoss(-(weight * values).sum(), int(objective.clipped.sum()), divergence)
