"""Advantages of the rollouts of one group (PULSE, equation 25)."""

from typing import Final

import torch
from torch import Tensor

from roles.trainer.learn.loss.loss_settings import AdvantageName

_MIN_DEVIATION: Final = 1e-6
"""Rewards with a smaller standard deviation do not tell which rollout was better."""


def advantages(rewards: Tensor, name: AdvantageName = "standardized") -> Tensor:
    """Compute the advantages of one group.

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
