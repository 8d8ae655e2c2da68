"""The names of losses and advantages, as run.toml has them; this module imports no torch."""

from typing import Literal

LossName = Literal["grpo", "token-mean", "dr-grpo", "gspo", "cispo"]
"""Which loss: see the table in policy_loss.py."""

AdvantageName = Literal["standardized", "centered"]
"""Standardized: (r - mean) / std, equation 25. Centered: r - mean, without the bias towards groups whose rewards hardly
differ (Dr. GRPO, Liu et al. 2025).
"""
