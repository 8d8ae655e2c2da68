"""The loss of a step: a weighted sum over tokens of a surrogate objective with its correction for the age of rollouts,
and if wanted of an entropy and a divergence. `loss_settings.LOSSES` says what each loss consists of.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from roles.trainer.learn.loss.loss_settings import LARGEST_LOG_RATIO, AdvantageName, AggregationName, LossSettings
from roles.trainer.learn.loss.surrogates import Tokens, surrogate_of

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


AGGREGATIONS: Final[dict[AggregationName, TokenWeights]] = {
    "token-mean": token_mean,
    "sequence-mean": sequence_mean,
    "constant-length": constant_length,
}

_MIN_DEVIATION: Final = 1e-6
"""Rewards with a smaller standard deviation do not tell which rollout was better."""


def advantages(rewards: Tensor, name: AdvantageName = "standardized") -> Tensor:
    """Compute the advantages of the rollouts of one group, float32 [R] from rewards float32 [R] (PULSE, equation 25).
    The standard deviation is the population's. All are zero if the rewards do not differ, but for `reward`.
    """
    if name == "reward":
        return rewards
    deviation = rewards.std(correction=0)
    if deviation < _MIN_DEVIATION:
        return torch.zeros_like(rewards)
    centered = rewards - rewards.mean()
    if name == "rloo":  # r - (sum of the others) / (R - 1)
        return centered * (len(rewards) / (len(rewards) - 1))
    return centered / deviation if name == "standardized" else centered


def reference_divergence(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimate D_KL(pi_theta || pi_ref) of equation 23 at each token, in nats, as exp(d) - d - 1 with d = log pi_ref -
    log pi_theta: float32 [N] of float32 [N] each. The estimator is never negative, and unbiased for tokens that
    pi_theta samples (Schulman 2020, "k3").
    """
    difference = (reference - log_probs).clamp(max=LARGEST_LOG_RATIO)
    return difference.exp() - difference - 1


def entropy(logits: Tensor, temperature: float) -> Tensor:
    """Return the entropy of the sampled distribution in nats, float32 [N], of logits [N, V]."""
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return -(log_p.exp() * log_p).sum(dim=-1)


def correction_weights(tokens: Tokens, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """Return pi_before / pi_sampling of each token, truncated or masked: float32 [N], constant, and which are out of
    bounds: bool [N].
    """
    ratio = (tokens.proximal - tokens.behaviour).detach().clamp(max=LARGEST_LOG_RATIO).exp()
    low, high = settings.correction_bounds
    outside = (ratio < low) | (ratio > high)
    return ratio.masked_fill(outside, 0.0) if settings.correction == "masked" else ratio.clamp(low, high), outside


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of a batch, and figures for monitoring."""

    value: Tensor  # float32 scalar with a gradient, to be minimized; the losses of a step's batches add up
    clipped_tokens: int  # whose ratio was out of bounds
    divergence: float  # sum over tokens of the divergence from the reference policy, nats; 0 without one


def policy_loss(tokens: Tokens, weight: Tensor, settings: LossSettings) -> PolicyLoss:
    """Compute the loss of a batch: -sum_t w_t (correction_t objective_t + alpha H_t - beta KL_t). The weights are
    float32 [N], by the loss's `TokenWeights`. ValueError if there is a KL coefficient and no reference.
    """
    objective = surrogate_of(settings)(tokens, settings)
    values, clipped, divergence = objective.values, objective.clipped, 0.0
    if settings.correction != "none":
        correction, outside = correction_weights(tokens, settings)
        values, clipped = correction * values, clipped | outside
    if settings.entropy_coefficient:
        values = values + settings.entropy_coefficient * tokens.entropy
    if settings.has_reference:
        distances = reference_divergence(tokens.log_probs, tokens.teacher)
        divergence = float(distances.detach().sum())
        if settings.kl_coefficient:
            values = values - settings.kl_coefficient * distances
    return PolicyLoss(-(weight * values).sum(), int(clipped.sum()), divergence)
