"""With which factors the contributions of a round count, and which are refused as poisoned.

Only the coordinator computes this, and the round manifest has the result, so order and precision are free here. Four
bounds apply, one after the other:

1. A contribution that is longer than the median is scaled down to it, so that no site counts for its length.
2. A contribution must agree with the others: the cosine between it and the sum of the others (leave one out) is
   compared with the median of these cosines. The least agreeing one is removed, and the rest is compared again, as long
   as fewer than half of all are removed. Two contributions cannot be told apart, so this needs three.
3. The same holds, with a higher share of the median, for the sums of what each site sent in many rounds
   (protocol/outer/comparing.py). The noise of a round averages out in a sum, so the cosines of honest sites come close
   to each other, and a small drift that a site adds in every round stands out.
4. No site has more than a share of the summed lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_high, median_low
from typing import Any

import numpy as np

from protocol.outer.comparing import Comparison, LongProducts, Matrix, SentSums


@dataclass(frozen=True)
class RobustSettings:
    """The bounds of one coordinator.

    Attributes:
        clips: whether contributions are scaled down to the median length.
        agreement: share of the median cosine that a contribution must reach; 0 refuses only those that point away from
            the others; None refuses none.
        long_agreement: the same for sums over rounds; None refuses none.
        clear_cosine: a median cosine of sums below this says nothing, since honest sites then agree by chance.
        share: largest share of one site of the summed lengths, if there are enough sites for it; 1 for no bound.
    """

    clips: bool = True
    agreement: float | None = 0.25
    long_agreement: float | None = 0.88
    clear_cosine: float = 0.2
    share: float = 0.5


PLAIN_MEAN = RobustSettings(clips=False, agreement=None, long_agreement=None, share=1.0)
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


def weigh_round(
    workers: Sequence[bytes], comparison: Comparison, sums: SentSums, settings: RobustSettings
) -> Weighting:
    """Return the factors of the contributions of a round, and add them to the sums of what their workers sent."""
    lengths = np.sqrt(np.diag(comparison.products)).tolist()
    long = sums.add(workers, comparison.projections, _length_factors(lengths, clips=True))
    return weigh(comparison.products, settings, long)


def weigh(products: Matrix, settings: RobustSettings, long: LongProducts | None = None) -> Weighting:
    """Return the factors of the contributions of a round.

    Args:
        products: their inner products: float64 [R, R].
        long: the same of the sums over rounds; None if there are none.
    """
    lengths = np.sqrt(np.diag(products)).tolist()
    factors = _length_factors(lengths, clips=settings.clips)
    active = list(range(len(lengths)))
    first_cosines = _cosines(products, factors, active)
    if settings.agreement is not None:
        _refuse(active, active, products, factors, settings.agreement, 0.0)
    if settings.long_agreement is not None and long is not None:
        settled = [place for place in active if long.settled[place]]
        scales = _length_factors(np.sqrt(np.diag(long.products)).tolist(), clips=True)
        _refuse(active, settled, long.products, scales, settings.long_agreement, settings.clear_cosine)
    _limit_shares(factors, lengths, active, settings.share)
    return Weighting(
        tuple(factors[place] if place in active else 0.0 for place in range(len(lengths))),
        tuple(first_cosines[place] for place in range(len(lengths))),
    )


def _length_factors(lengths: Sequence[float], *, clips: bool) -> list[float]:
    """Return the factors that scale contributions down to the median length.

    Of an even number it is the lower of the two in the middle, or the other one if that is 0: half of the sites cannot
    have the others refused because they send nothing.
    """
    if not clips or not lengths:
        return [1.0] * len(lengths)
    bound = median_low(lengths) or median_high(lengths)
    return [min(1.0, bound / length) if length > 0 else 1.0 for length in lengths]


def _refuse(
    active: list[int],
    compared: Sequence[int],
    products: Matrix,
    factors: Sequence[float],
    agreement: float,
    clear_cosine: float,
) -> None:
    """Remove from `active` those of the compared ones that do not agree with the others, one after the other.

    Args:
        compared: active ones; of fewer than three, none can be told apart.
        agreement: share of the median cosine that each must reach.
        clear_cosine: nobody is removed if the median is lower.
    """
    rest = list(compared)
    while len(rest) >= 3:
        cosines = _cosines(products, factors, rest)
        middle = median(cosines.values())
        worst = min(rest, key=lambda place: cosines[place])
        removed = len(factors) - len(active)
        enough = cosines[worst] >= agreement * max(0.0, middle) or (clear_cosine > 0 and middle < clear_cosine)
        if enough or 2 * (removed + 1) >= len(factors):
            return
        rest.remove(worst)
        active.remove(worst)


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
