"""How much of what a site sent over the rounds is a drift: a part that stays the same from round to round.

In each round, a contribution is compared with the mean of the others that counted. It is a multiple of what that mean
and it have in common, plus a rest. The rest of an honest site is noise, with a different direction each time, so the
products of the rests of different rounds are zero on average. If a site adds the same direction in each round, these
products are the squared length of its drift. So neither the length of the noise nor the number of the other sites
matters, and honest sites may go in a new direction in each round.

Noise goes on for a while: an optimizer remembers the gradients of its last steps, and what a gate held back is sent a
round later. So only contributions that are at least `INDEPENDENT_STEPS` local steps and `INDEPENDENT` contributions
apart are multiplied with each other.

What these products say is uncertain by chance, as there are few of them at first. This uncertainty follows from the
rests themselves: the signs of a projection are random, so each of its numbers would have had the opposite sign with the
same probability (protocol/outer/comparing.py). A drift counts only as far as it exceeds `CERTAINTY` standard
deviations.

A site with a drift is not refused: its contribution is scaled down until the drift in it is short, and the rest counts.
So a site that only seems to drift goes on like the others, and what it sends later shows it.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.kernels.inner_products import Matrix, dot
from protocol.outer.comparing import SentRound

INDEPENDENT: Final = 3
"""By how many contributions of its site two of them are apart, if their noise is independent."""

INDEPENDENT_STEPS: Final = 24
"""By how many local steps they are apart as well."""

SETTLED: Final = 5
"""Contributions of a site, beyond the first ones that are that far apart, before they are compared over the rounds."""

DECAY: Final = 0.9
"""What a contribution of a site weighs for each contribution that it made later, or for each `DECAY_STEPS` steps."""

DECAY_STEPS: Final = 8

LARGEST_DRIFT: Final = 0.33
"""The longest drift in a contribution that counts, as a share of the length that the others have in common."""

CERTAINTY: Final = 3.0
"""Standard deviations by which a figure exceeds what chance would show."""


@dataclass(frozen=True)
class _Projected:
    """What a site sent in some rounds, oldest first.

    Attributes:
        weights: of the rounds: float64 [N].
        own: projections of its contributions: float64 [N, PROJECTED].
        others: of the means of the others' contributions: float64 [N, PROJECTED].
        streams: which the contributions have: int64 [N].
        agreement: mean product of two of the others: float64 [N], and its variance if they agreed by chance.
    """

    weights: Matrix
    own: Matrix
    others: Matrix
    streams: NDArray[np.int64]
    agreement: Matrix
    variance: Matrix


def settled_contributions(local_steps: int) -> int:
    """Return how many contributions of a site say something: 8 with 8 local steps or more, 29 with one."""
    return max(INDEPENDENT, -(-INDEPENDENT_STEPS // local_steps)) + SETTLED


def drift_factor(
    rounds: Sequence[SentRound], worker: bytes, local_steps: int, excluded: Collection[bytes] = ()
) -> float:
    """Return the factor, at most 1, that scales a site's contribution down until the drift in it is short.

    Args:
        rounds: oldest first.
        local_steps: of a round, by its rules.
        excluded: sites that do not count among the others.

    Returns:
        1 if the rounds show no drift, or a short one, or say nothing: the site took part in too few rounds with at
        least two others, or the others have no common direction.
    """
    settled = settled_contributions(local_steps)
    apart = settled - SETTLED
    decay = 1 - (1 - DECAY) * min(local_steps, DECAY_STEPS) / DECAY_STEPS
    projected = _project(rounds, worker, excluded, decay)
    if projected is None or len(projected.weights) < settled:
        return 1.0
    squares = projected.weights * projected.weights
    agreement = dot(squares, projected.agreement)
    if agreement <= CERTAINTY * math.sqrt(dot(squares * squares, projected.variance)):
        return 1.0
    scale = max(0.0, dot(squares[:, None] * projected.own, projected.others)) / agreement
    drift = _least_drift(projected.weights, projected.own - scale * projected.others, projected.streams, apart)
    bound = LARGEST_DRIFT**2 * agreement / dot(projected.weights, projected.weights)
    return 1.0 if drift <= bound else math.sqrt(bound / drift)


def _project(
    rounds: Sequence[SentRound], worker: bytes, excluded: Collection[bytes], decay: float
) -> _Projected | None:
    """Return what is compared; None if it is nothing."""
    rows = []
    for sent in rounds:
        places = [
            place
            for place, other in enumerate(sent.workers)
            if other != worker and other not in sent.disagreeing and other not in excluded
        ]
        if worker in sent.workers and len(places) >= 2:
            rows.append((sent, sent.workers.index(worker), places))
    if not rows:
        return None
    agreements = np.array([_agreement(sent, places) for sent, _, places in rows])
    return _Projected(
        weights=np.multiply.accumulate([1.0, *[decay] * (len(rows) - 1)])[::-1],
        own=np.array([sent.projections[place] for sent, place, _ in rows], np.float64),
        others=np.array([sum(sent.projections[places].astype(np.float64)) / len(places) for sent, _, places in rows]),
        streams=np.array([sent.stream for sent, _, _ in rows]),
        agreement=agreements[:, 0],
        variance=agreements[:, 1],
    )


def _agreement(sent: SentRound, places: Sequence[int]) -> tuple[float, float]:
    """Return the mean product of two of some contributions, and its variance if they agreed by chance."""
    products, square_products = (matrix[np.ix_(places, places)] for matrix in sent.products)
    return _mean_of_pairs(products), _mean_of_pairs(square_products) / _pairs(len(places))


def _pairs(count: int) -> float:
    return count * (count - 1) / 2


def _mean_of_pairs(products: Matrix) -> float:
    """Return the mean of those products in a matrix that are not of something with itself."""
    return dot(products, np.triu(np.ones_like(products), 1)) / _pairs(len(products))


def _least_drift(weights: Matrix, rests: Matrix, streams: NDArray[np.int64], apart: int) -> float:
    """Return the least squared length of a drift that rests show: at least 0.

    Args:
        weights: float64 [N]; rests: float64 [N, PROJECTED], oldest first; streams: int64 [N].
        apart: by how many contributions the two of each pair are apart, at least.
    """
    estimate = variance = pairs = 0.0
    for stream in sorted(set(streams.tolist())):
        # Each contribution is multiplied with the sum of those that are long enough ago: that is one product for all.
        total, total_squares, total_weight = (np.zeros(rests.shape[1]), np.zeros(rests.shape[1]), 0.0)
        for old, new in zip(range(len(rests)), range(apart, len(rests)), strict=False):
            if streams[old] == stream:
                total += weights[old] * rests[old]
                total_squares += (weights[old] * rests[old]) ** 2
                total_weight += weights[old]
            if streams[new] == stream:
                estimate += dot(weights[new] * rests[new], total)
                variance += dot((weights[new] * rests[new]) ** 2, total_squares)
                pairs += weights[new] * total_weight
    return max(0.0, estimate - CERTAINTY * math.sqrt(variance)) / pairs if pairs > 0 else 0.0
