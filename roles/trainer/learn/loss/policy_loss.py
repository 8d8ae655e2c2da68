"""The loss of a step, chosen by name: a weighted sum over tokens of a surrogate objective and, if wanted, a divergence.

    name        objective of a token    weight of a token       advantage       source
    grpo        clipped ratio           1 / (C |y|)             standardized    PULSE, equation 23
    token-mean  clipped ratio           1 / tokens of the step  standardized    DAPO
    dr-grpo     clipped ratio           1 / (C max_tokens)      centered        Dr. GRPO
    gspo        clipped sequence ratio  1 / (C |y|)             standardized    GSPO
    cispo       clipped weight          1 / tokens of the step  standardized    CISPO

C is the number of completions of the step, and |y| the tokens of the completion.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from roles.trainer.learn.loss.divergence import reference_divergence
from roles.trainer.learn.loss.loss_settings import AdvantageName, LossName, LossSettings
from roles.trainer.learn.loss.surrogates import Surrogate, sampled_weight, sequence_ratio, token_ratio
from roles.trainer.learn.loss.token_weights import TokenWeights, constant_length, sequence_mean, token_mean


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


def token_weights(settings: LossSettings, lengths: Sequence[int], max_tokens: int) -> list[float]:
    """Return the weight of each token of each completion of a step: one number for each completion.

    Args:
        lengths: of all completions of the step, in tokens; at least one token in all.
        max_tokens: the longest completion that the run allows.
    """
    return LOSSES[settings.loss].weights(lengths, max_tokens)


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of a batch, and figures for monitoring.

    Attributes:
        value: float32 scalar with a gradient, to be minimized; the losses of a step's batches add up.
        clipped_tokens: tokens whose ratio was out of bounds.
        divergence: sum over tokens of the divergence from the reference policy, nats; 0 without one.
    """

    value: Tensor
    clipped_tokens: int
    divergence: float


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
        weight: float32 [N], of `token_weights`.
        settings: the constants.
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
