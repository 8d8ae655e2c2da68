"""With which factors the contributions of a round count, and which are refused as poisoned.

Only the coordinator computes this, and the round manifest has the result, so order and precision are free here. Three
bounds apply, one after the other:

1. A contribution that is longer than the median is scaled down to it, so that no site counts for its length.
2. A contribution must agree with the others: the cosine between it and the sum of the others (leave one out) is
   compared with the median of these cosines. The least agreeing one is removed, and the rest is compared again, as long
   as fewer than half of all are removed. Two contributions cannot be told apart, so this needs three.
3. No site has more than a share of the summed lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median, median_low
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.outer.shared_state import SharedState
from protocol.pseudogradient import decode

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class RobustSettings:
    """The bounds of one coordinator.

    Attributes:
        clips: whether contributions are scaled down to the median length.
        agreement: share of the median cosine that a contribution must reach; 0 refuses only those that point away from
            the others; None refuses none.
        share: largest share of one site of the summed lengths, if there are enough sites for it; 1 for no bound.
    """

    clips: bool = True
    agreement: float | None = 0.25
    share: float = 0.5


PLAIN_MEAN = RobustSettings(clips=False, agreement=None, share=1.0)
"""No bounds: the mean of the papers."""


@dataclass(frozen=True)
class Weighting:
    """The result for one round.

    Attributes:
        factors: of each contribution, in (0, 1]; 0 for a poisoned one.
        cosines: of each with the sum of the others, before any was removed.
    """

    factors: tuple[float, ...]
    cosines: tuple[float, ...]


def inner_products(state: SharedState, payloads: Sequence[bytes]) -> Matrix:
    """Return the inner products of all contributions with each other: float64 [R, R].

    Raises:
        MalformedError, LimitError, ContributionError: a payload is broken.
    """
    products = np.zeros((len(payloads), len(payloads)))
    decoders = [decode(payload, state.weights, state.digests.weights) for payload in payloads]
    for rows in zip(*decoders, strict=True):
        values = [row[1].astype(np.float64) for row in rows]
        for i, own in enumerate(values):
            products[i, i] += own @ own
        for i, j in combinations(range(len(values)), 2):
            products[i, j] += values[i] @ values[j]
    return products + np.triu(products, 1).T


def weigh(products: Matrix, settings: RobustSettings) -> Weighting:
    """Return the factors of the contributions of a round.

    Args:
        products: their inner products: float64 [R, R].
    """
    lengths = np.sqrt(np.diag(products)).tolist()
    factors = [1.0] * len(lengths)
    if settings.clips and lengths:
        bound = median_low(lengths)
        factors = [min(1.0, bound / length) if length > 0 else 1.0 for length in lengths]
    active = list(range(len(lengths)))
    first_cosines = _cosines(products, factors, active)
    cosines = dict(first_cosines)
    while settings.agreement is not None and len(active) >= 3:
        threshold = settings.agreement * max(0.0, median(cosines.values()))
        worst = min(active, key=lambda place: cosines[place])
        removed = len(lengths) - len(active)
        if cosines[worst] >= threshold or 2 * (removed + 1) >= len(lengths):
            break
        active.remove(worst)
        cosines = _cosines(products, factors, active)
    _limit_shares(factors, lengths, active, settings.share)
    return Weighting(
        tuple(factors[place] if place in active else 0.0 for place in range(len(lengths))),
        tuple(first_cosines[place] for place in range(len(lengths))),
    )


def _cosines(products: Matrix, factors: Sequence[float], active: Sequence[int]) -> dict[int, float]:
    """Return the cosine of each active contribution with the sum of the other active ones; 0 for a zero vector."""
    scale: Any = np.zeros(len(factors))
    scale[list(active)] = np.asarray(factors)[list(active)]
    scaled = products * scale[:, None] * scale[None, :]
    total = float(scaled.sum())
    result = {}
    for place in active:
        own, with_all = float(scaled[place, place]), float(scaled[place].sum())
        others = total - 2 * with_all + own
        length = np.sqrt(max(own, 0.0) * max(others, 0.0))
        result[place] = (with_all - own) / float(length) if length > 0 else 0.0
    return result


def _limit_shares(factors: list[float], lengths: Sequence[float], active: Sequence[int], share: float) -> None:
    """Scale down the contributions whose length is more than a share of the sum; the sum is that after scaling."""
    if share * len(active) <= 1 or share >= 1:
        return  # no scaling can give each of so few sites less than that
    scaled = sorted((factors[place] * lengths[place] for place in active), reverse=True)
    bound = scaled[0]
    for count in range(1, len(scaled)):
        rest = sum(scaled[count:])
        if share * count >= 1:
            break
        bound = share * rest / (1 - share * count)
        if bound >= scaled[count]:
            break
    for place in active:
        length = factors[place] * lengths[place]
        if length > bound > 0:
            factors[place] *= bound / length
