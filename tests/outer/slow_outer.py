"""A slow reference of a round's arithmetic: one numpy operation after the other, over whole tensors."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Tensors = dict[str, NDArray[np.float32]]


def step(
    weights: Tensors,
    momentum: Tensors,
    contributions: Sequence[Mapping[str, NDArray[np.float32]]],
    factors: Sequence[float],
    mu: float,
    alpha: float,
) -> tuple[Tensors, Tensors]:
    """Return weights and momentum after a round, by docs/spec/pseudogradient.md, section 2."""
    new_weights, new_momentum = {}, {}
    for name, base in weights.items():
        total = np.zeros_like(base)
        for values, factor in zip(contributions, factors, strict=True):
            total = total + np.float32(factor) * values[name]
        mean = total / np.float32(len(contributions))
        new_momentum[name] = momentum[name]
        direction = mean
        if mu:
            new_momentum[name] = np.float32(mu) * momentum[name] + mean
            direction = np.float32(mu) * new_momentum[name] + mean
        new_weights[name] = base - np.float32(alpha) * direction
    return new_weights, new_momentum
