"""With which factors the contributions of a round count, and which are refused as poisoned.

Only the coordinator computes this, and the round manifest has the result. Every sum has a fixed order, or is
rounded once (`fsum`), so the result is the same on every processor, bit for bit. Four bounds apply, one after the
other:

1. A contribution that is longer than the median is scaled down to it, so that no site counts for its length.
2. A contribution must agree with the others: the cosine between it and the sum of the others (leave one out) is
   compared with the median of these cosines. The least agreeing one is taken out, and the rest is compared again, as
   long as fewer than half of all are taken out. Two contributions cannot be told apart, so this needs three. A site may
   disagree by chance, so what was taken out is scaled down to a tenth. It is refused if all contributions of its site
   disagreed for as long as a drift takes to show, and until one agrees again.
3. A contribution is scaled down if what its site sent over many rounds shows a drift, and the more the longer that is
   (protocol/outer/drift.py).
4. No site has more than a share of the summed lengths.

A contribution without values, or one that is much shorter than the median, is not compared, and counts as it is: its
direction is chance, and all that it can do is to make the step smaller by its share, or to move the weights by less
than an unnoticed drift.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Final

import numpy as np

from protocol.kernels.inner_products import Matrix, row_products
from protocol.outer.comparing import (
    Comparison,
    SentRound,
    SentRounds,
    length_factors,
    median_length,
    projection_size,
    shortened,
)
from protocol.outer.drift import drift_factors, settled_contributions

DISTRUST: Final = 0.1
"""What scales a contribution down that does not agree with the others; a share of the median length."""


AGREEMENT: Final = 0.25
"""The share of the median cosine that a contribution must reach."""

COMPARED_LENGTH: Final = 0.1
"""The share of the median length below which a contribution is not compared."""

LARGEST_SHARE: Final = 0.5
"""The largest share of one site of the summed lengths, if there are enough sites for it."""


@dataclass(frozen=True)
class Weighting:
    """The result for one round."""

    factors: tuple[float, ...]  # of each contribution, in (0, 1]; 0 for a poisoned one
    cosines: tuple[float, ...]  # of each with the sum of the others, before any was removed
    drift_factors: tuple[float, ...]  # what its drift scales each down by, from the rounds up to this one
    sent: SentRound  # what is remembered of the round


def sent_round(workers: Sequence[bytes], comparison: Comparison) -> SentRound:
    """Return what is remembered of a round's contributions of these workers, ascending, as if all agreed."""
    compared = _compared(comparison.lengths.tolist())
    scaled = comparison.projections * np.array(length_factors(comparison.lengths.tolist()))[:, None]
    projections = shortened(scaled[compared].astype(np.float32), projection_size(len(compared)))
    return SentRound(tuple(workers[place] for place in compared), projections, stream=comparison.stream)


def weigh_round(workers: Sequence[bytes], comparison: Comparison, earlier: SentRounds) -> Weighting:
    """Return the factors of the contributions of these workers, ascending, given what sites sent in earlier rounds."""
    lengths = comparison.lengths.tolist()
    scales, active = length_factors(lengths), list(range(len(lengths)))
    cosines_of = partial(_cosines, comparison, np.array(scales), comparison.projections * np.array(scales)[:, None])
    first_cosines = cosines_of(active)
    _refuse(active, _compared(lengths), cosines_of)
    disagreeing = frozenset(workers).difference(workers[place] for place in active)
    sent = sent_round(workers, comparison)
    found = drift_factors(earlier.after(sent).rounds, comparison.local_steps, disagreeing)
    drifts = [found.get(worker, 1.0) for worker in workers]
    factors = [factor * drift for factor, drift in zip(scales, drifts, strict=True)]
    limit_shares(factors, lengths, active)
    sent = replace(sent, disagreeing=disagreeing)
    rounds, settled = earlier.after(sent).rounds, settled_contributions(comparison.local_steps)
    result = tuple(
        factor * _agreement_factor(rounds, worker, settled) for worker, factor in zip(workers, factors, strict=True)
    )
    cosines = tuple(first_cosines[place] for place in range(len(lengths)))
    return Weighting(result, cosines, tuple(drifts), sent)


def _compared(lengths: Sequence[float]) -> list[int]:
    """Return the contributions that are long enough to be compared with the others."""
    bound = COMPARED_LENGTH * median_length(lengths)
    return [place for place, length in enumerate(lengths) if length > 0 and length >= bound]


def _refuse(active: list[int], compared: Sequence[int], cosines_of: Callable[[list[int]], Mapping[int, float]]) -> None:
    """Remove from `active` fewer than half of those that are compared in this round: those that do not reach a share of
    the median cosine of what is left, one after the other.
    """
    remaining = list(compared)
    while 2 * (len(compared) - len(remaining) + 1) < len(compared):
        cosines = cosines_of(remaining)
        if len(cosines) < 3:
            return
        worst = min(cosines, key=lambda place: cosines[place])
        if cosines[worst] >= AGREEMENT * max(0.0, median(cosines.values())):
            return
        active.remove(worst)
        remaining.remove(worst)


def _cosines(comparison: Comparison, scales: Matrix, projections: Matrix, active: Sequence[int]) -> dict[int, float]:
    """Return the cosine of each active contribution, scaled down to the median length (float64 [R]), with the sum of
    the other active ones; 0 for a zero vector. That is the sum of all less the others, which are multiplied by
    projections, scaled likewise.
    """
    squares = np.square(scales * comparison.lengths)
    absent = np.zeros(projections.shape[1])
    for place in sorted(set(range(len(scales))).difference(active)):
        absent += projections[place]
    with_active = comparison.with_all - row_products(projections, absent)
    total = math.fsum(with_active[list(active)].tolist())
    result = {}
    for place in active:
        own, product = float(squares[place]), float(with_active[place]) - float(squares[place])
        length = math.sqrt(own * max(total - 2 * product - own, 0.0))
        result[place] = product / length if length > 0 else 0.0
    return result


def _agreement_factor(rounds: Sequence[SentRound], worker: bytes, settled: int) -> float:
    """Return what scales a contribution down if it disagrees: 0 if the `settled` ones before it all did too."""
    if worker not in rounds[-1].disagreeing:
        return 1.0
    disagreements = [worker in sent.disagreeing for sent in rounds if worker in sent.workers][-settled:]
    return 0.0 if len(disagreements) == settled and all(disagreements) else DISTRUST


def limit_shares(
    factors: list[float], lengths: Sequence[float], active: Sequence[int], share: float = LARGEST_SHARE
) -> None:
    """Scale down the contributions whose length is more than a share of the sum; the sum is that after scaling."""
    if share * len(active) <= 1:
        return  # no scaling can give each of so few sites less than that
    scaled = sorted((factors[place] * lengths[place] for place in active), reverse=True)
    bound = scaled[0]
    for count in range(1, len(scaled)):
        rest = math.fsum(scaled[count:])
        if share * count >= 1:
            break
        bound = share * rest / (1 - share * count)
        if bound >= scaled[count]:
            break
    for place in active:
        length = factors[place] * lengths[place]
        if length > bound > 0:
            factors[place] *= bound / length
