"""The bits of evidence in a sketch, for each position, against a miner without the hidden states."""

import math
from typing import Final

import numpy as np

from grailnode.calibration.rates import binomial_tail

FALSE_REJECTION: Final = 1e-4


def max_misses(rate: float, length: int) -> int:
    """Return the number of misses that an honest rollout exceeds with a probability below FALSE_REJECTION."""
    return next(k for k in range(length + 1) if k == length or binomial_tail(k + 1, length, rate) < FALSE_REJECTION)


def worth(probabilities: np.ndarray, misses: int) -> float:
    """Return the bits of evidence a position of one rollout.

    Args:
        probabilities: float64 [T], the probability that a forged value agrees at each position.
        misses: how many positions may disagree.
    """
    miss_probabilities = np.zeros(misses + 1)  # probability of 0, 1, ... misses among the positions so far
    miss_probabilities[0] = 1.0
    for p in probabilities:
        miss_probabilities = miss_probabilities * p + np.concatenate([[0.0], miss_probabilities[:-1]]) * (1.0 - p)
    return -math.log2(max(float(miss_probabilities.sum()), 1e-300)) / len(probabilities)
