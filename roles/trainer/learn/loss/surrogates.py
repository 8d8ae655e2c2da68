"""The objective of each token: what a policy gains when the probability of the token changes.

Each function takes the same tensors, so that a loss names one of them (`policy_loss.LOSSES`). The importance ratio is
that of the *behaviour* policy, which sampled the token and may be some versions old.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from roles.trainer.learn.loss.loss_settings import LossSettings


@dataclass(frozen=True)
class Objective:
    """The objective of each token, to be maximized.

    Attributes:
        values: float32 [N], with gradient.
        clipped: bool [N], tokens that give no gradient because their ratio is out of bounds; for `sampled_weight`,
            whose tokens all give gradients, tokens whose weight is reduced or raised to a bound.
    """

    values: Tensor
    clipped: Tensor


Surrogate = Callable[[Tensor, Tensor, Tensor, Tensor, LossSettings], Objective]
"""A function of (log_probs, behaviour, advantage, rows, settings).

    log_probs: float32 [N], log pi_theta of each token, with gradient.
    behaviour: float32 [N], log pi_old of each token.
    advantage: float32 [N], of each token's completion.
    rows: int64 [N], the completion of each token.
"""


def token_ratio(
    log_probs: Tensor, behaviour: Tensor, advantage: Tensor, rows: Tensor, settings: LossSettings
) -> Objective:
    """Compute min(r_t A, clip(r_t, 1 - eps_low, 1 + eps_high) A), the ratio r_t being that of the token (equations 23
    and 24).
    """
    return _clipped(log_probs - behaviour, advantage, settings)


def sequence_ratio(
    log_probs: Tensor, behaviour: Tensor, advantage: Tensor, rows: Tensor, settings: LossSettings
) -> Objective:
    """Compute the same with one ratio for a completion: the geometric mean of those of its tokens (GSPO, Zheng et al.
    2025).

    Such ratios are close to 1, so GSPO's clips are, too: 3e-4 and 4e-4 in its paper.
    """
    completions = int(rows.max()) + 1
    sums = log_probs.new_zeros(completions).index_add(0, rows, log_probs - behaviour)
    lengths = rows.bincount(minlength=completions).clamp(min=1)
    return _clipped((sums / lengths)[rows], advantage, settings)


def sampled_weight(
    log_probs: Tensor, behaviour: Tensor, advantage: Tensor, rows: Tensor, settings: LossSettings
) -> Objective:
    """Compute w_t A log pi_theta, with the clipped ratio as a constant weight w_t (CISPO, MiniMax 2025).

    Every token gives a gradient: the clip bounds its weight and does not drop it. CISPO's paper has no lower bound,
    which is clip_low = 1.
    """
    ratio = (log_probs.detach() - behaviour).clamp(max=settings.log_limit).exp()
    weight = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return Objective(weight * advantage * log_probs, weight != ratio)


def _clipped(log_ratio: Tensor, advantage: Tensor, settings: LossSettings) -> Objective:
    # Truncated before exp, whose overflow would make the gradient of a truncated ratio 0 * inf.
    limit = settings.log_limit
    ratio = log_ratio.clamp(max=limit).exp()
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    too_high = (ratio > 1 + settings.clip_high) & (advantage > 0)
    too_low = (ratio < 1 - settings.clip_low) & (advantage < 0)
    return Objective(
        values=torch.minimum(ratio * advantage, bounded * advantage),
        clipped=too_high | too_low | (log_ratio >= limit),
    )
