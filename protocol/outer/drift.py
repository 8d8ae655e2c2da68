"""How much of what a site sent over the rounds is a drift: a part that stays the same from round to round.

In each round, a contribution is compared with the mean of the others that counted. It is a multiple of what that mean
and it have in common, plus a rest. The rest of an honest site is noise, with a different direction each time, so the
products of the rests of different rounds are zero on average. If a site adds the same direction in each round, these
products are the squared length of its drift. So neither the length of the noise nor the number of the other sites
matters, and honest sites may go in a new direction in each round.

Noise goes on for a while: an optimizer remembers the gradients of its last steps, and what a gate held back is sent a
round later. So the rests of `BLOCK` contributions or `BLOCK_STEPS` local steps are added up to a block, and only blocks
that are at least `INDEPENDENT_STEPS` and a whole block apart are multiplied with each other.

What these products say is uncertain by chance, as there are few of them at first. This uncertainty follows from the
rests themselves: the signs of a projection are random, so each of its numbers would have had the opposite sign with the
same probability (protocol/outer/comparing.py). A drift counts only as far as it exceeds `CERTAINTY` standard
deviations.

A site with a drift is not refused. Its contribution is scaled down by the square of how often its drift has the allowed
length, so a longer drift moves the weights less. What a site sends later shows whether it only seemed to drift.
"""

import math
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.kernels.inner_products import Matrix, dot
from protocol.outer.comparing import SentRound, SiteSums

BLOCK: Final = 3
BLOCK_STEPS: Final = 8
"""Contributions in a block, and local steps: at least both."""

INDEPENDENT_STEPS: Final = 24
"""Local steps between two blocks whose noise is independent."""

DECAY: Final = 0.98
"""What a contribution of a site weighs for each contribution that it made later, or for each `DECAY_STEPS` steps."""

DECAY_STEPS: Final = 8

LARGEST_DRIFT: Final = 0.2
"""The longest drift in a contribution that counts, as a share of the length that the others have in common."""

CERTAINTY: Final = 3.0
"""Standard deviations by which a figure exceeds what chance would show."""


def _layout(local_steps: int) -> tuple[int, int]:
    """Return the contributions in a block, and by how many blocks the two of each pair are apart, at least."""
    block = max(BLOCK, -(-BLOCK_STEPS // local_steps))
    return block, 1 + -(-INDEPENDENT_STEPS // (block * local_steps))


def settled_contributions(local_steps: int) -> int:
    """Return how many contributions of a site say something: 9 with 8 local steps or more, 40 with one."""
    block, apart = _layout(local_steps)
    return block * (apart + 1)


def drift_factors(
    rounds: Sequence[SentRound], workers: Sequence[bytes], local_steps: int, excluded: Collection[bytes] = ()
) -> list[float]:
    """Return the factors, at most 1, that scale the sites' contributions down so that the drifts in them are short.

    Args:
        rounds: oldest first.
        local_steps: of a round, by its rules.
        excluded: sites that do not count among the others.

    Returns:
        1 where the rounds show no drift, or a short one, or say nothing: the site took part in too few rounds with at
        least two others.
    """
    sums = [sent.sums.without(*excluded) for sent in rounds]
    return [_drift_factor(worker, sums, local_steps) for worker in workers]


def _drift_factor(worker: bytes, sums: Sequence[SiteSums], local_steps: int) -> float:
    block, apart = _layout(local_steps)
    decay = 1 - (1 - DECAY) * min(local_steps, DECAY_STEPS) / DECAY_STEPS
    rounds = [others.without(worker) for others in sums if worker in others.sent.workers]
    rounds = [others for others in rounds if len(others.workers) >= 2]
    if len(rounds) < settled_contributions(local_steps):
        return 1.0
    weights = np.multiply.accumulate([1.0, *[decay] * (len(rounds) - 1)])[::-1]
    squares = weights * weights
    # Others without a common direction leave room for as much as chance would show.
    agreements = np.array([others.agreement() for others in rounds])
    chance = CERTAINTY * math.sqrt(dot(squares * squares, agreements[:, 1]))
    agreement = max(dot(squares, agreements[:, 0]), chance)
    if agreement <= 0:
        return 1.0
    own = np.array([others.sent.row(worker) for others in rounds])
    means = np.array([others.total / len(others.workers) for others in rounds])
    scale = max(0.0, dot(squares[:, None] * own, means)) / agreement
    rests = weights[:, None] * (own - scale * means)
    streams = np.array([others.sent.stream for others in rounds])
    drift = _least_drift(_blocks(weights, rests, streams, block), apart)
    bound = LARGEST_DRIFT**2 * agreement / dot(weights, weights)
    return 1.0 if drift <= bound else bound / drift


_Block = tuple[int, int, float, Matrix]
"""Its stream, its number, its weight, and the sum of its rests: float64 [PROJECTED]."""


def _blocks(weights: Matrix, rests: Matrix, streams: NDArray[np.int64], size: int) -> list[_Block]:
    """Return the sums of so many consecutive rests, by stream, that end with the newest one; a rest may be left over.

    Args:
        weights: float64 [N]; rests: float64 [N, PROJECTED], oldest first, times their weights; streams: int64 [N].
    """
    blocks = []
    for number in range(len(rests) // size):
        places = np.arange(size) + len(rests) % size + number * size
        for stream in sorted(set(streams[places].tolist())):
            own = places[streams[places] == stream]
            blocks.append((stream, number, math.fsum(weights[own]), sum(rests[own])))
    return blocks


def _least_drift(blocks: Sequence[_Block], apart: int) -> float:
    """Return the least squared length of a drift that blocks show: at least 0.

    Args:
        apart: by how many blocks the two of each pair are apart, at least.
    """
    estimate = variance = pairs = 0.0
    for stream, newest, weight, rest in blocks:
        old = [block for block in blocks if block[0] == stream and block[1] <= newest - apart]
        if old:
            estimate += dot(rest, sum(block[3] for block in old))
            variance += dot(rest * rest, sum(block[3] * block[3] for block in old))
            pairs += weight * math.fsum(block[2] for block in old)
    return max(0.0, estimate - CERTAINTY * math.sqrt(variance)) / pairs if pairs > 0 else 0.0
