"""The learning rate of each step: a linear warm-up, then constant, or down along half a cosine or a line."""

import math
from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["constant", "cosine", "linear"]


@dataclass(frozen=True)
class RateSchedule:
    """How the learning rate follows the step.

    Attributes:
        name: its course after the warm-up.
        warmup_steps: steps over which it rises linearly to its peak; 0 for none.
        training_steps: the step at which it has come down; not used by a constant rate.
        final_share: the share of the peak that it comes down to.
    """

    name: ScheduleName = "constant"
    warmup_steps: int = 0
    training_steps: int = 0
    final_share: float = 0.0

    def share(self, step: int) -> float:
        """Return the learning rate of a step as a share of its peak.

        Args:
            step: counts from 1.
        """
        if self.warmup_steps and step <= self.warmup_steps:
            return min(1.0, step / self.warmup_steps)
        if self.name == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.training_steps - self.warmup_steps))
        height = 1 - progress if self.name == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.final_share + (1 - self.final_share) * height
