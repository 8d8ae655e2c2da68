"""What a coordinator compares contributions by: inner products in a round, and what each site sent in earlier rounds.

Whole contributions of many rounds would take as much memory for each site as the weights, many times. So those of older
rounds are *random projections*: each element is multiplied by a sign, and then all elements whose index in their part
is the same modulo `PROJECTED` are added up. The inner product of two projections is that of the contributions but for
an error of about 1 / sqrt(PROJECTED) of their lengths. The signs follow from a secret of the coordinator, so that no
site can choose a direction that its projection does not show.

A site is compared by the sum of what it sent with the sum of what the others sent *in the same rounds*. So it does not
matter in how many rounds a site is away. The cosine of these sums depends on how much noise is left in them, which is
more after few rounds than after many, and more with few others than with many. So lengths are computed without noise.
Noise is independent between sites and between rounds, so on average it adds to one kind of product only: that of a
contribution with itself. Its place takes the mean product with the others of the round. Then the cosine of an honest
site is about 1, and that of a site that adds the same direction in each round is lower.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.outer.shared_state import SharedState
from protocol.pseudogradient import decode

Matrix = NDArray[np.float64]
Projections = NDArray[np.float32]

PROJECTED: Final = 1 << 14
"""Numbers in a projection; also the elements of each contribution that are multiplied at a time, to fit in a cache."""

DECAY: Final = 0.9
"""What the contribution of a site counts in its sum for each contribution that it made later."""

SETTLED: Final = 8
"""Contributions of a site before its sum says something."""

REMEMBERED_ROUNDS: Final = 64
"""Rounds whose projections are remembered. A site that takes part in fewer than SETTLED of them is not compared."""

CLEAR: Final = 0.25
"""Share of the squared length of a sum that must not be noise; with less, its cosine says too little."""


@dataclass(frozen=True)
class Comparison:
    """The contributions of a round.

    Attributes:
        products: their inner products with each other: float64 [R, R].
        projections: float64 [R, PROJECTED].
    """

    products: Matrix
    projections: Matrix


@dataclass(frozen=True)
class SentRound:
    """What the sites sent in a round.

    Attributes:
        workers: those whose contribution was long enough to be compared, in ascending order.
        projections: of their contributions, each scaled down to the median length: float32 [R, PROJECTED].
        refused: the workers whose contribution did not count.
    """

    workers: tuple[bytes, ...]
    projections: Projections
    refused: frozenset[bytes] = frozenset()

    @cached_property
    def products(self) -> Matrix:
        """The inner products of the projections: float64 [R, R]."""
        wide = self.projections.astype(np.float64)
        products: Matrix = wide @ wide.T
        return products

    def places_for(self, worker: bytes) -> list[int]:
        """Return what a worker is compared by: the places of its own contribution, and of the others that counted."""
        return [place for place, own in enumerate(self.workers) if own == worker or own not in self.refused]

    def noise(self, places: Sequence[int]) -> Matrix:
        """Return what each of some contributions has in common with itself, but not with the mean of the others:
        float64 [R].
        """
        products = self.products[np.ix_(places, places)]
        own = np.diag(products)
        noise: Matrix = own - (products.sum(axis=1) - own) / max(1, len(own) - 1)
        return noise


@dataclass(frozen=True)
class SharedRounds:
    """What all sites sent in the rounds in which one of them took part, as weighted sums over these rounds.

    Attributes:
        place: of that site in the arrays.
        products: inner products of the sums: float64 [S, S].
        noise: the part of their squared lengths that is noise of single rounds: float64 [S].
    """

    place: int
    products: Matrix
    noise: Matrix

    def cosine(self, excluded: Collection[int] = ()) -> float | None:
        """Return the cosine of the site's sum with the sum of the others, without noise in their lengths.

        Args:
            excluded: places of sites that do not count among the others.

        Returns:
            None if it says nothing, since one of the sums is noise for the most part. So who hides a drift in noise
            has little length left for it.
        """
        lengths = np.sqrt(np.diag(self.products))
        used = lengths > 0
        bound = float(np.median(lengths[used])) if used.any() else 0.0
        others: Any = np.where(used, np.minimum(1.0, bound / np.where(used, lengths, 1.0)), 0.0)
        others[[self.place, *excluded]] = 0.0
        whole = np.array([self.products[self.place, self.place], others @ self.products @ others])
        clear = whole - (self.noise[self.place], others**2 @ self.noise)
        if (clear <= CLEAR * whole).any():
            return None
        return float(self.products[self.place] @ others) / float(np.sqrt(clear.prod()))


def compare(state: SharedState, payloads: Sequence[bytes], secret: bytes) -> Comparison:
    """Compare the contributions of a round.

    Args:
        state: with which the round began.
        secret: of the coordinator, for the signs: at least 16 bytes.

    Raises:
        MalformedError, LimitError, ContributionError: a payload is broken.
    """
    products, projections = np.zeros((len(payloads),) * 2), np.zeros((len(payloads), PROJECTED))
    decoders = [decode(payload, state.weights, state.digests.weights) for payload in payloads]
    for number, rows in enumerate(zip(*decoders, strict=True)):
        size = rows[0][1].size
        random = np.random.Philox(key=int.from_bytes(secret[:16], "little"), counter=number << 192)
        bits = np.frombuffer(np.random.Generator(random).bytes(-(-size // 8)), np.uint8)
        for begin, end in pairwise([*range(0, size, PROJECTED), size]):
            block = np.array([values[begin:end] for _, values in rows], np.float64)
            products += block @ block.T
            signs = np.unpackbits(bits[begin // 8 : -(-end // 8)])[: end - begin]
            projections[:, : end - begin] += np.where(signs, block, -block)
    return Comparison(products, projections)


NOTHING_SENT: Final = SentRound((), np.empty((0, PROJECTED), np.float32))
"""What the sites sent in a round without contributions."""


class SentRounds:
    """What the sites sent in the newest rounds.

    Attributes:
        rounds: in their order, at most REMEMBERED_ROUNDS.
    """

    def __init__(self, rounds: Sequence[SentRound] = ()) -> None:
        self.rounds = tuple(rounds[-REMEMBERED_ROUNDS:])
        self._sums: dict[tuple[tuple[int, ...], ...], tuple[Matrix, Matrix]] = {}  # of sites with the same rounds

    def after(self, sent: SentRound) -> "SentRounds":
        """Return these rounds with a new one."""
        return SentRounds((*self.rounds, sent))

    def shared(self, worker: bytes) -> SharedRounds | None:
        """Return what all sites sent in the rounds in which a worker took part; None if these are too few.

        What was refused in its round counts in the sum of its own site alone. Rounds with fewer than two others are
        left out: of two sites, none can be told apart. Places in the result are those in `sites`.
        """
        own = [(n, sent.places_for(worker)) for n, sent in enumerate(self.rounds) if worker in sent.workers]
        own = [(number, places) for number, places in own if len(places) >= 3]
        if len(own) < SETTLED:
            return None
        key = tuple((number, *places) for number, places in own)
        if key not in self._sums:
            self._sums[key] = self._added(own)
        return SharedRounds(self.sites.index(worker), *self._sums[key])

    def _added(self, own: Sequence[tuple[int, list[int]]]) -> tuple[Matrix, Matrix]:
        """Add up contributions of some rounds; see `SharedRounds`.

        Args:
            own: numbers of rounds, and places of the contributions that count in them.
        """
        sites = self.sites
        sums, noise = np.zeros((len(sites), PROJECTED)), np.zeros(len(sites))
        for age, (number, places) in enumerate(reversed(own)):
            sent, weight = self.rounds[number], DECAY**age
            rows = [sites.index(sent.workers[place]) for place in places]
            sums[rows] += weight * sent.projections[places]
            noise[rows] += weight * weight * sent.noise(places)
        return sums @ sums.T, noise

    @cached_property
    def sites(self) -> list[bytes]:
        """All workers that sent something in these rounds, in ascending order."""
        return sorted({worker for sent in self.rounds for worker in sent.workers})
