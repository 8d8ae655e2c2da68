"""The constants of a loss, which are keys of [trainer]; this module imports no torch."""

import math
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from roles.settings_base import Settings

LossName = Literal["grpo", "token-mean", "dr-grpo", "gspo", "cispo"]
"""Which loss: see the table in policy_loss.py."""

AdvantageName = Literal["standardized", "centered"]
"""Standardized: (r - mean) / std, equation 25. Centered: r - mean, without the bias towards groups whose rewards hardly
differ (Dr. GRPO, Liu et al. 2025).
"""

LARGEST_LOG_RATIO: Final = 20.0
"""A larger logarithm of a ratio is reduced to this one, so that no ratio overflows."""


class LossSettings(Settings):
    """The constants of a loss.

    clip_low and clip_high are epsilon_low and epsilon_high of equation 23, the asymmetric clip (PULSE, F.4). The
    truncation bounds the ratio whatever the sign of the advantage (dual clip, Ye et al. 2020), so that a token that the
    policy has come to prefer since cannot dominate a step.
    """

    loss: LossName = "token-mean"
    """The loss of a step; docs/guide/train.md says what each computes."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The importance ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(default=0.28, ge=0)
    """The importance ratio is clipped above 1 + clip_high."""
    truncation: float = Field(default=3.0, gt=1)
    """Upper bound of the importance ratio whatever the advantage; inf for none."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the divergence from version 0; 0 for none."""
    advantage: Literal["of-loss", AdvantageName] = "of-loss"
    """How advantages are computed; of-loss: as belongs to the loss."""
    overlong_filtering: bool = False
    """Leave out completions that reached the longest length without an end (DAPO): their reward says that they were cut
    off, not that they were bad.
    """

    @model_validator(mode="after")
    def _check_truncation(self) -> Self:
        if self.truncation <= 1 + self.clip_high:
            raise ValueError(f"truncation must be above 1 + clip_high = {1 + self.clip_high:g}: the clip comes first")
        return self

    @property
    def log_limit(self) -> float:
        """The logarithm of the largest ratio that is computed."""
        return min(math.log(self.truncation), LARGEST_LOG_RATIO)
