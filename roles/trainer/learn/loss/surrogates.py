"""The objective of each token: what a policy gains when the probability of the token changes.

A loss names one of these functions (`loss_settings.LOSSES`), or one of its owner's with the same signature. Each takes
the tokens of a batch and returns an `Objective`.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from roles.trainer.learn.loss.loss_settings import LARGEST_LOG_RATIO, LossSettings, SurrogateName


@dataclass(frozen=True)
class Tokens:
    """The drawn tokens of a batch, one completion behind another: float32 [N] each, on one device."""

    log_probs: Tensor  # log pi_theta, with gradient
    behaviour: Tensor  # log pi_old under the policy that sampled the token, as validators computed it
    proximal: Tensor  # log pi_theta before this step, constant
    advantage: Tensor  # of each token's completion
    rows: Tensor  # int64 [N], the completion of each token within the batch
    entropy: Tensor  # of the distribution before each token, nats; with gradient if it has a coefficient
    reference: Tensor | None = None  # log pi_ref under the reference policy; None without one

    def log_ratio(self, settings: LossSettings) -> Tensor:
        """Return log (pi_theta / pi_old), with gradient; a correction puts the policy before the step for pi_old."""
        return self.log_probs - (self.behaviour if settings.correction == "none" else self.proximal)

    @property
    def teacher(self) -> Tensor:
        """The log-probabilities of the reference policy; ValueError if there is none."""
        if self.reference is None:
            raise ValueError("this loss needs the log-probabilities of a reference policy")
        return self.reference


@dataclass(frozen=True)
class Objective:
    """The objective of each token, to be maximized."""

    values: Tensor  # float32 [N], with gradient
    # bool [N], tokens whose ratio is out of bounds. They give no gradient, or, in `sampled_weight`, one with the weight
    # of the bound
    clipped: Tensor


Surrogate = Callable[[Tokens, LossSettings], Objective]
"""The signature of a loss of one's own. Passes add up, so the objective of a token may depend on its own completion
alone.
"""


def token_ratio(tokens: Tokens, settings: LossSettings) -> Objective:
    """Compute min(r_t A, clip(r_t, 1 - eps_low, 1 + eps_high) A), the ratio r_t being that of the token (equations 23
    and 24).
    """
    return _clipped(tokens.log_ratio(settings), tokens.advantage, settings)


def sequence_ratio(tokens: Tokens, settings: LossSettings) -> Objective:
    """Compute the same with one ratio for a completion: the geometric mean of those of its tokens (GSPO, Zheng et al.
    2025). Such ratios are close to 1, and so are GSPO's clips.
    """
    log_ratio, rows = tokens.log_ratio(settings), tokens.rows
    completions = int(rows.max()) + 1
    sums = log_ratio.new_zeros(completions).index_add(0, rows, log_ratio)
    lengths = rows.bincount(minlength=completions).clamp(min=1)
    return _clipped((sums / lengths)[rows], tokens.advantage, settings)


def sampled_weight(tokens: Tokens, settings: LossSettings) -> Objective:
    """Compute w_t A log pi_theta, with the clipped ratio as a constant weight w_t (CISPO, MiniMax 2025). Every token
    gives a gradient: the clip bounds its weight and does not drop it.
    """
    ratio = tokens.log_ratio(settings).detach().clamp(max=LARGEST_LOG_RATIO).exp()
    weight = ratio.clamp(*settings.clip_bounds)
    return Objective(weight * tokens.advantage * tokens.log_probs, weight != ratio)


def likelihood(tokens: Tokens, settings: LossSettings) -> Objective:
    """Compute A log pi_theta: supervised learning from completions that are weighed by A, as by their reward."""
    return Objective(tokens.advantage * tokens.log_probs, torch.zeros_like(tokens.rows, dtype=torch.bool))


def teacher(tokens: Tokens, settings: LossSettings) -> Objective:
    """Compute the clipped ratio with the advantage log pi_ref - log pi_theta of each token: for tokens that the policy
    itself samples, the gradient of -D_KL(pi_theta || pi_ref) (on-policy distillation, Agarwal et al. 2024).
    """
    return _clipped(tokens.log_ratio(settings), tokens.teacher - tokens.log_probs.detach(), settings)


SURROGATES: Final[dict[SurrogateName, Surrogate]] = {
    "token-ratio": token_ratio,
    "sequence-ratio": sequence_ratio,
    "sampled-weight": sampled_weight,
    "likelihood": likelihood,
    "teacher": teacher,
}


def surrogate_of(settings: LossSettings) -> Surrogate:
    """Return the function of a loss; ValueError if that of one's own cannot be imported."""
    module, _, name = settings.loss.partition(":")
    if not name:
        return SURROGATES[settings.spec.surrogate]
    try:
        own: Surrogate = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{settings.loss} cannot be imported ({error})") from error
    return own


def _clipped(log_ratio: Tensor, advantage: Tensor, settings: LossSettings) -> Objective:
    # Truncated before exp, whose overflow would make the gradient of a truncated ratio 0 * inf.
    limit, (low, high) = settings.log_limit, settings.clip_bounds
    ratio = log_ratio.clamp(max=limit).exp()
    too_high = (ratio > high) & (advantage > 0)
    too_low = (ratio < low) & (advantage < 0)
    return Objective(
        values=torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage),
        clipped=too_high | too_low | (log_ratio >= limit),
    )
