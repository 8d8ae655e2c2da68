"""The constants of a loss, which are keys of [trainer], and the table of losses; this module imports no torch."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from roles.settings_base import Settings

LossName = Literal["token-mean", "grpo", "dr-grpo", "gspo", "cispo", "supervised", "distillation"]
OWN_LOSS: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""The name of a function of one's own: `module:function` (surrogates.py has its signature)."""

SurrogateName = Literal["token-ratio", "sequence-ratio", "sampled-weight", "likelihood", "teacher"]
"""What a token's objective is: a function of surrogates.py."""

AggregationName = Literal["token-mean", "sequence-mean", "constant-length"]
"""How tokens are weighed: a function of policy_loss.py."""

AdvantageName = Literal["standardized", "centered", "rloo", "reward"]
"""Standardized: (r - mean) / std, equation 25. Centered: r - mean, without the bias towards groups whose rewards hardly
differ (Dr. GRPO, Liu et al. 2025). Rloo: r - mean of the group's other rewards (Ahmadian et al. 2024). Reward: r.
"""

CorrectionName = Literal["none", "decoupled", "truncated", "masked"]
"""How a step corrects for policies that are not the one it starts from. None: the importance ratio is that of the
sampling policy. The others: the ratio is that of the policy before the step, and the objective has the constant weight
pi_before / pi_sampling as it is (decoupled PPO, Hilton et al. 2021), bounded (truncated importance sampling, Yao et al.
2025), or 0 where it is out of bounds (IcePop, Ling Team 2025).
"""

LARGEST_LOG_RATIO: Final = 20.0
"""A larger logarithm of a ratio is reduced to this one, so that no ratio overflows."""


@dataclass(frozen=True)
class LossSpec:
    """What a loss consists of, and its clips unless run.toml has others."""

    surrogate: SurrogateName
    aggregation: AggregationName
    advantage: AdvantageName
    clip_low: float
    clip_high: float


LOSSES: Final[dict[LossName, LossSpec]] = {
    "token-mean": LossSpec("token-ratio", "token-mean", "standardized", 0.2, 0.28),  # DAPO
    "grpo": LossSpec("token-ratio", "sequence-mean", "standardized", 0.2, 0.28),  # PULSE, equation 23 and F.4
    "dr-grpo": LossSpec("token-ratio", "constant-length", "centered", 0.2, 0.28),  # Dr. GRPO
    "gspo": LossSpec("sequence-ratio", "sequence-mean", "standardized", 3e-4, 4e-4),  # GSPO, section 5.1
    "cispo": LossSpec("sampled-weight", "token-mean", "standardized", 1.0, 4.0),  # no lower bound; 5 is ScaleRL's upper
    "supervised": LossSpec("likelihood", "token-mean", "reward", 0.2, 0.28),
    "distillation": LossSpec("teacher", "token-mean", "standardized", 0.2, 0.28),
}
_OF_OWN: Final = LOSSES["token-mean"]  # what a loss of one's own has beside its function

CORRECTION_BOUNDS: Final[dict[CorrectionName, tuple[float, float]]] = {
    "none": (0.0, math.inf),
    "decoupled": (0.0, math.inf),
    "truncated": (0.0, 2.0),
    "masked": (0.5, 5.0),
}


class LossSettings(Settings):
    """The constants of a loss.

    clip_low and clip_high are epsilon_low and epsilon_high of equation 23, the asymmetric clip (PULSE, F.4). The
    truncation bounds the ratio whatever the sign of the advantage (dual clip, Ye et al. 2020), so that a token that the
    policy has come to prefer since cannot dominate a step.
    """

    loss: LossName | str = "token-mean"
    """The loss of a step, or `module:function` of one's own; docs/guide/train.md says what each computes."""
    clip_low: float | None = Field(default=None, ge=0, le=1)
    """The importance ratio is clipped below 1 - clip_low; unset: as belongs to the loss."""
    clip_high: float | None = Field(default=None, ge=0)
    """The importance ratio is clipped above 1 + clip_high; unset: as belongs to the loss."""
    truncation: float = Field(default=3.0, gt=1)
    """Upper bound of a clipped ratio whatever the advantage; inf for none."""
    correction: CorrectionName = "none"
    """How a step corrects for the age of rollouts; docs/guide/train.md says what each computes."""
    correction_low: float | None = Field(default=None, ge=0)
    """Lower bound of the correction's weight; unset: 0, or 0.5 for masked."""
    correction_high: float | None = Field(default=None, gt=0)
    """Upper bound of the correction's weight; unset: inf, 2 for truncated, or 5 for masked."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the reference policy; 0 for none."""
    reference: Path | None = None
    """A directory with a checkpoint of the policy's shapes: the reference of the divergence, and the teacher of
    distillation; unset: version 0.
    """
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the entropy before each token, which the policy gains from; 0 for none."""
    advantage: Literal["of-loss", AdvantageName] = "of-loss"
    """How advantages are computed; of-loss: as belongs to the loss."""
    aggregation: Literal["of-loss", AggregationName] = "of-loss"
    """How tokens are weighed; of-loss: as belongs to the loss."""
    overlong_filtering: bool = False
    """Leave out completions that reached the longest length without an end (DAPO): their reward says that they were cut
    off, not that they were bad.
    """

    @field_validator("loss", mode="before")
    @classmethod
    def _check_name(cls, name: object) -> object:
        if not isinstance(name, str) or (name not in LOSSES and not OWN_LOSS.fullmatch(name)):
            raise ValueError(f"neither module:function nor one of {', '.join(LOSSES)}")
        return name

    @model_validator(mode="after")
    def _check_loss(self) -> Self:
        spec, high = self.spec, self.clip_bounds[1]
        if spec.surrogate in ("token-ratio", "sequence-ratio", "teacher") and self.truncation <= high:
            raise ValueError(f"truncation must be above 1 + clip_high = {high:g}: the clip comes first")
        if not self.correction_bounds[0] < self.correction_bounds[1]:
            raise ValueError("correction_low must be below correction_high")
        if self.correction != "none" and spec.surrogate == "sequence-ratio":
            raise ValueError(f"{self.loss} has one ratio for a completion, and correction one for each token: set none")
        if self.loss == "distillation" and self.reference is None:
            raise ValueError("distillation needs a reference: the checkpoint of the teacher")
        return self

    @property
    def spec(self) -> LossSpec:
        """What the loss consists of."""
        return next((spec for name, spec in LOSSES.items() if name == self.loss), _OF_OWN)

    @property
    def advantage_name(self) -> AdvantageName:
        return self.spec.advantage if self.advantage == "of-loss" else self.advantage

    @property
    def needs_contrast(self) -> bool:
        """Whether groups whose rewards are equal teach nothing."""
        return self.advantage_name != "reward" and self.spec.surrogate != "teacher"

    @property
    def aggregation_name(self) -> AggregationName:
        return self.spec.aggregation if self.aggregation == "of-loss" else self.aggregation

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """The bounds of the clipped ratio."""
        low = self.spec.clip_low if self.clip_low is None else self.clip_low
        high = self.spec.clip_high if self.clip_high is None else self.clip_high
        return 1 - low, 1 + high

    @property
    def correction_bounds(self) -> tuple[float, float]:
        """The bounds of the correction's weight."""
        low, high = CORRECTION_BOUNDS[self.correction]
        return (
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )

    @property
    def has_reference(self) -> bool:
        """Whether a step computes the log-probabilities of a reference policy."""
        return self.kl_coefficient > 0 or self.reference is not None

    @property
    def log_limit(self) -> float:
        """The logarithm of the largest ratio that is computed."""
        return min(math.log(self.truncation), LARGEST_LOG_RATIO)
