"""How much of what a site sent over the rounds is a drift: a part that stays the same from round to round.

In each round, a contribution is compared with the mean of the others that counted. It is a multiple of what that mean
and it have in common, plus a rest. The rest of an honest site is noise, with a different direction each time, so the
products of the rests of different rounds are zero on average. If a site adds the same direction in each round, these
products are the squared length of its drift. So neither the length of the noise nor the number of the other sites
matters, and honest sites may go in a new direction in each round.

Noise goes on for a while: an optimizer remembers the gradients of its last steps, and what a gate held back is sent a
round later. So the rests of `BLOCK` contributions and `BLOCK_STEPS` local steps are added up to a block, and only
blocks with `INDEPENDENT_STEPS` between them are multiplied with each other. A site that takes fewer steps than the
others sends shorter contributions, and its noise goes on for more of them. So steps are counted by the length, which
grows with their power of 2/3: noise alone would make it 1/2, and a fixed direction 1. Who sends short ones to be
measured later moves the weights less until then.

What these products say is uncertain by chance, as there are few of them at first. This uncertainty follows from the
rests themselves: the signs of a projection are random, so each of its numbers would have had the opposite sign with the
same probability (protocol/outer/comparing.py). Blocks that follow each other are alike, so those of `VARIANCE_STEPS`
are added up before they are squared. A drift counts only as far as it exceeds `CERTAINTY` standard deviations, and
`TOLERANCE` of one is allowed.

What a site adds to the mean of the others makes each of these drift the other way, by a part of its length. So all
sites of the remembered rounds are measured, whether they take part in the newest one or not. A site of which the rounds
say nothing does not count among the others. If a drift is found, then the site with the largest one, or with what looks
like it, is taken out of the means, and the rest is measured again, as long as fewer than half of the contributions are
taken out. A site that sends as several, one after the other, is not more of them than if it sent as one.

A site with a drift is not refused. Its contribution is scaled down by the square of how often its drift has the allowed
length, so a longer drift moves the weights less. The allowed length grows with the number of sites, since each has its
share of the mean. What a site sends later shows whether it only seemed to drift.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Final

import numpy as np

from protocol.kernels.inner_products import Matrix, dot
from protocol.outer.comparing import SentRound, SiteSums

BLOCK: Final = 2
BLOCK_STEPS: Final = 8
"""Contributions in a block, and local steps: at least both."""

INDEPENDENT_STEPS: Final = 40
"""Local steps between two blocks whose noise is independent."""

VARIANCE_STEPS: Final = 24
"""Local steps of which the rests are added up before their squares say how much chance would show."""

DECAY: Final = 0.98
"""What a contribution of a site weighs for each contribution that it made later, or for each `DECAY_STEPS` steps."""

DECAY_STEPS: Final = 8

LARGEST_DRIFT: Final = 0.2
LARGEST_SHIFT: Final = 0.01
"""The longest drift of a contribution that counts, and how far that of one site may shift the mean of all: shares of
the length that the others have in common."""

CERTAINTY: Final = 3.0
"""Standard deviations by which a figure exceeds what chance would show."""

ALIKE: Final = 4.0
"""How often as large as another squared drift the largest one may be, if both sites are taken out at once."""

TOLERANCE: Final = 0.5
"""Standard deviations of a squared drift that are allowed in any case, for a site that exceeds `CERTAINTY` by chance.
"""


def settled_contributions(local_steps: int) -> int:
    """Return how many contributions of a site say something: 10 with 8 local steps or more, 56 with one."""
    block = max(BLOCK, -(-BLOCK_STEPS // local_steps))
    return block * (2 + -(-INDEPENDENT_STEPS // (block * local_steps)))


def largest_drift(sites: int) -> float:
    """Return the longest drift that counts in a contribution to a round in which so many sites' are compared, as a
    share of the length that the others have in common.
    """
    return min(LARGEST_DRIFT, LARGEST_SHIFT * sites)


@dataclass(frozen=True)
class _Drift:
    """What the rounds show of a site's drift; 0 for all three if they say nothing."""

    estimate: float = 0.0  # of its squared length
    certain: float = 0.0  # what chance does not explain of that
    allowed: float = 0.0  # the largest one that counts in full


def drift_factors(
    rounds: Sequence[SentRound], local_steps: int, disagreeing: Collection[bytes] = ()
) -> dict[bytes, float]:
    """Return the factors below 1 that scale sites' contributions down so that the drifts in them are short, from
    rounds, oldest first. Sites that disagree do not count among the others. There is no factor for a site whose drift
    is short, or of which the rounds say nothing: it took too few steps in rounds with at least two others.
    """
    outliers, factors = set(disagreeing), dict[bytes, float]()
    candidates = {worker for sent in rounds for worker in sent.workers} - outliers
    sent_by = Counter(worker for sent in rounds if len(sent.workers) > 2 for worker in sent.workers)
    while candidates:
        sums = [sent.sums.without(*set(sent.workers).difference(candidates)) for sent in rounds]
        drifts = {worker: _drift_of(worker, sums, local_steps) for worker in sorted(candidates)}
        measured = {worker for worker in candidates if drifts[worker].allowed > 0}
        if len(measured) < len(candidates):
            candidates = measured
            continue
        drifting = [worker for worker in candidates if drifts[worker].certain > drifts[worker].allowed]
        if not drifting:
            break
        largest = sorted(sorted(candidates), key=lambda worker: -drifts[worker].estimate)[: max(1, len(drifting) // 4)]
        contributions = sum(sent_by[worker] for worker in candidates | outliers)
        for worker in largest:
            if 2 * sum(sent_by[other] for other in outliers | {worker}) >= contributions:
                return factors
            if ALIKE * drifts[worker].estimate >= drifts[largest[0]].estimate:
                candidates.remove(worker)
                outliers.add(worker)
                if worker in drifting:
                    factors[worker] = drifts[worker].allowed / drifts[worker].certain
    return factors


def _drift_of(worker: bytes, sums: Sequence[SiteSums], local_steps: int) -> _Drift:
    decay = 1 - (1 - DECAY) * min(local_steps, DECAY_STEPS) / DECAY_STEPS
    rounds = [others.without(worker) for others in sums if worker in others.sent.workers]
    rounds = [others for others in rounds if len(others.workers) >= 2]
    if len(rounds) < 2 * BLOCK:
        return _Drift()
    weights = np.multiply.accumulate([1.0, *[decay] * (len(rounds) - 1)])[::-1]
    squares = weights * weights
    # Others without a common direction leave room for as much as chance would show.
    agreements = np.array([others.agreement() for others in rounds])
    chance = CERTAINTY * math.sqrt(dot(squares * squares, agreements[:, 1]))
    agreement = max(dot(squares, agreements[:, 0]), chance)
    if agreement <= 0:
        return _Drift()
    own = np.array([others.sent.row(worker) for others in rounds])
    means = np.array([others.total / len(others.workers) for others in rounds])
    scale = max(0.0, dot(squares[:, None] * own, means)) / agreement
    rests = weights[:, None] * (own - scale * means)
    streams = [others.sent.stream for others in rounds]
    lengths = [others.sent.relative_length(worker) for others in rounds]
    steps = [max(1, round(local_steps * length * math.sqrt(length))) for length in lengths]
    products, variance, pairs = _products(_blocks(weights, rests, streams, steps))
    if pairs <= 0:
        return _Drift()
    drift, deviation = products / pairs, math.sqrt(variance) / pairs
    longest = largest_drift(len(rounds[-1].sent.workers))
    bound = longest * longest * agreement / dot(weights, weights)
    return _Drift(drift, drift - CERTAINTY * deviation, max(bound, TOLERANCE * deviation))


@dataclass(frozen=True)
class _Block:
    """Consecutive contributions of a site, as far as they have one stream."""

    stream: int
    begin: int  # local steps that the site took before the block
    end: int  # local steps up to the block's end
    weight: float  # sum of the weights
    rest: Matrix  # sum of the rests times their weights: float64 [PROJECTED]


def _blocks(weights: Matrix, rests: Matrix, streams: Sequence[int], steps: Sequence[int]) -> list[_Block]:
    """Return the blocks, oldest first: the last one ends with the newest rest, and some of the oldest are left over. Of
    the N contributions, oldest first, there are the weights, float64 [N], the rests times their weights, float64 [N,
    PROJECTED], the streams and the steps.
    """
    ends = list(accumulate(steps))
    blocks: list[_Block] = []
    end = len(steps)
    for begin in reversed(range(len(steps))):
        step_count = ends[end - 1] - ends[begin] + steps[begin]
        if end - begin >= BLOCK and step_count >= BLOCK_STEPS:
            for stream in sorted(set(streams[begin:end])):
                places = [place for place in range(begin, end) if streams[place] == stream]
                weight, rest = math.fsum(weights[places]), reduce(np.add, rests[places])
                blocks.insert(0, _Block(stream, ends[begin] - steps[begin], ends[end - 1], weight, rest))
            end = begin
    return blocks


def _products(blocks: Sequence[_Block]) -> tuple[float, float, float]:
    """Return the sum of the products of blocks with independent noise, its variance by chance, and that of the weights'
    products.
    """
    products = variance = pairs = 0.0
    for stream in sorted({block.stream for block in blocks}):
        own = [block for block in blocks if block.stream == stream]
        for group in _groups(own):
            new: list[_Block] = []
            for block in group:
                old = [other for other in own if other.end + INDEPENDENT_STEPS <= block.begin]
                if old:
                    new.append(block)
                    products += dot(block.rest, sum(other.rest for other in old))
                    pairs += block.weight * math.fsum(other.weight for other in old)
            if new:
                variance += dot(_squares([new]), _squares(_groups(old)))
    return products, variance, pairs


def _groups(blocks: Sequence[_Block]) -> list[list[_Block]]:
    """Return blocks in groups of so many steps that their noise is nearly independent, oldest first."""
    groups: list[list[_Block]] = []
    for block in blocks:
        if groups and block.begin < groups[-1][0].begin + VARIANCE_STEPS:
            groups[-1].append(block)
        else:
            groups.append([block])
    return groups


def _squares(groups: Sequence[Sequence[_Block]]) -> Matrix:
    """Return the sum of the squared sums of the groups' rests: float64 [PROJECTED]."""
    sums = [reduce(np.add, [block.rest for block in group]) for group in groups]
    result: Matrix = reduce(np.add, [own * own for own in sums])
    return result
