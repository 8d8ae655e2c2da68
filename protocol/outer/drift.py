"""How much of what a site sent over the rounds is a drift: a part that stays the same from round to round.

In each round, a contribution is compared with the mean of the others that counted. It is a multiple of what that mean
and it have in common, plus a rest. The rest of an honest site is noise, with a different direction each time, so the
products of the rests of different rounds are zero on average. If a site adds the same direction in each round, these
products are the squared length of its drift. So neither the length of the noise nor the number of the other sites
matters, and honest sites may go in a new direction in each round.

Noise goes on for a while: an optimizer remembers its last gradients, and what a gate held back is sent a round later.
So only contributions that are at least `INDEPENDENT` apart are multiplied with each other.

What these products say is uncertain by chance, as there are few of them at first. This uncertainty follows from the
rests themselves: the signs of a projection are random, so each of its numbers would have had the opposite sign with the
same probability (protocol/outer/comparing.py). A drift counts only as far as it exceeds `CERTAINTY` standard
deviations.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.kernels.inner_products import Matrix, dot, inner_products
from protocol.outer.comparing import SentRound

SETTLED: Final = 8
"""Contributions of a site before they are compared over the rounds."""

COMPARED_ROUNDS: Final = 32
"""Newest contributions of a site that are compared."""

DECAY: Final = 0.9
"""What a contribution of a site weighs for each contribution that it made later."""

INDEPENDENT: Final = 3
"""By how many contributions of its site two of them are apart, if their noise is independent."""

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


def drift_cosine(rounds: Sequence[SentRound], worker: bytes, excluded: Collection[bytes] = ()) -> float | None:
    """Return the cosine between what a site sent, without noise, and the same without its drift.

    Args:
        rounds: oldest first.
        excluded: sites that do not count among the others.

    Returns:
        1 if the rounds show no drift. None if they say nothing, since the site took part in too few rounds with at
        least two others, or the others have no common direction.
    """
    projected = _project(rounds, worker, excluded)
    if projected is None:
        return None
    squares = projected.weights * projected.weights
    agreement = dot(squares, projected.agreement)
    if agreement <= CERTAINTY * math.sqrt(dot(squares * squares, projected.variance)):
        return None
    common = max(0.0, dot(squares[:, None] * projected.own, projected.others))
    scale = common / agreement
    drift = _least_drift(projected.weights, projected.own - scale * projected.others, projected.streams)
    common_square = scale * common / dot(projected.weights, projected.weights)
    if drift + common_square <= 0:
        return None
    return math.sqrt(common_square / (common_square + drift))


def _project(rounds: Sequence[SentRound], worker: bytes, excluded: Collection[bytes]) -> _Projected | None:
    """Return what is compared; None if it is too little."""
    rows = []
    for sent in reversed(rounds):
        if worker not in sent.workers:
            continue
        places = [
            place
            for place, other in enumerate(sent.workers)
            if other != worker and other not in sent.refused and other not in excluded
        ]
        if len(places) >= 2:
            rows.append((sent, sent.workers.index(worker), places))
        if len(rows) == COMPARED_ROUNDS:
            break
    if len(rows) < SETTLED:
        return None
    rows.reverse()
    agreements = np.array([_agreement(sent, places) for sent, _, places in rows])
    return _Projected(
        weights=np.multiply.accumulate([1.0, *[DECAY] * (len(rows) - 1)])[::-1],
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


def _least_drift(weights: Matrix, rests: Matrix, streams: NDArray[np.int64]) -> float:
    """Return the least squared length of a drift that rests show: at least 0.

    Args:
        weights: float64 [N]; rests: float64 [N, PROJECTED], oldest first; streams: int64 [N].
    """
    order = np.arange(len(rests))
    apart = np.abs(order[:, None] - order) >= INDEPENDENT
    pairs: Any = np.outer(weights, weights) * (apart & (streams[:, None] == streams))
    if not pairs.any():
        return 0.0
    estimate = dot(pairs, inner_products(rests))
    variance = 2 * dot(pairs * pairs, inner_products(rests * rests))  # each pair is there twice
    return max(0.0, estimate - CERTAINTY * math.sqrt(variance)) / dot(pairs, np.ones_like(pairs))
