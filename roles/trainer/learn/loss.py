"""Group-relative policy optimization (GRPO) as pure functions of tensors.

From PULSE, appendix H.1 (equations 23-25) and F.4, without the KL term. It differs in two ways, both standard: the mean
is taken over tokens rather than first over each completion (DAPO, Yu et al. 2025), so a token of a long completion
weighs as much as one of a short one; and the importance ratio is taken against the *behaviour* policy, which may be
some versions old, and is truncated, so that a token that the policy has come to prefer since cannot dominate a step
(dual clip, Ye et al. 2020).

Shapes: N tokens of all completions of the batch, concatenated; R rollouts of one group; V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_MIN_DEVIATION: Final = 1e-6
"""Rewards with a smaller standard deviation do not tell which rollout was better."""


@dataclass(frozen=True)
class LossSettings:
    """The constants of equation 23.

    Attributes:
        clip_low, clip_high: epsilon_low and epsilon_high, the asymmetric clip (PULSE, F.4).
        truncation: upper bound of the importance ratio; above 1 + clip_high.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    truncation: float = 3.0


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of a batch, and a figure for monitoring.

    Attributes:
        value: float32 scalar with a gradient, to be minimized: the sum over N tokens, for the caller to divide.
        clipped_tokens: tokens whose ratio was clipped or truncated, so that they gave no gradient.
    """

    value: Tensor
    clipped_tokens: int


def advantages(rewards: Tensor) -> Tensor:
    """Compute equation 25: (r_i - mean) / std over one group, with the population's standard deviation.

    Args:
        rewards: float32 [R].

    Returns:
        float32 [R]; all zero if the rewards do not differ.
    """
    deviation = rewards.std(correction=0)
    if deviation < _MIN_DEVIATION:
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / deviation


def policy_loss(log_probs: Tensor, behaviour: Tensor, advantage: Tensor, settings: LossSettings) -> PolicyLoss:
    """Compute equations 23 and 24, negated and summed: -sum_t min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t).

    Args:
        log_probs: float32 [N], log pi_theta of each token, with gradient.
        behaviour: float32 [N], log pi_old of each token, under the policy that sampled it.
        advantage: float32 [N], the advantage of each token's completion.
        settings: the constants.
    """
    # Truncated before exp, whose overflow would make the gradient of a truncated ratio 0 * inf.
    limit = math.log(settings.truncation)
    ratio = (log_probs - behaviour).clamp(max=limit).exp()
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    objective = torch.minimum(ratio * advantage, bounded * advantage)
    too_high = (ratio > 1 + settings.clip_high) & (advantage > 0)
    too_low = (ratio < 1 - settings.clip_low) & (advantage < 0)
    truncated = log_probs - behaviour >= limit
    return PolicyLoss(value=-objective.sum(), clipped_tokens=int((too_high | too_low | truncated).sum()))


def entropy(logits: Tensor, temperature: float) -> Tensor:
    """Return the entropy of the sampled distribution in nats, float32 [N], of logits [N, V]."""
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return -(log_p.exp() * log_p).sum(dim=-1)
