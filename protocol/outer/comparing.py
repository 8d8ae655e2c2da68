"""What a coordinator compares contributions by: inner products in a round, and the sums of what each site sent before.

A sum over rounds of whole contributions would take as much memory for each site as the weights. So the sums are those
of *random projections*: each element is multiplied by a sign, and then all elements whose index in their part is the
same modulo `PROJECTED` are added up. The inner product of two projections is that of the contributions but for an error
of about 1 / sqrt(PROJECTED) of their lengths. The signs follow from a secret of the coordinator, so that no site can
choose a direction that its projection does not show.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.outer.shared_state import SharedState
from protocol.pseudogradient import decode

Matrix = NDArray[np.float64]

PROJECTED: Final = 1 << 14
"""Numbers in a projection; also the elements of each contribution that are multiplied at a time, to fit in a cache."""

DECAY: Final = 0.9
"""What a sum keeps of the earlier contributions when the next one is added."""

SETTLED: Final = 8
"""Contributions of a site before its sum says something; each round without one takes one of them away."""


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
class LongProducts:
    """The sums of what some sites sent.

    Attributes:
        products: their inner products: float64 [R, R].
        settled: which of the sites have sent enough for that.
    """

    products: Matrix
    settled: tuple[bool, ...]


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


class SentSums:
    """What each site sent over the rounds, in projections; older contributions count less."""

    def __init__(self) -> None:
        self._sums: dict[bytes, Matrix] = {}
        self._counts: dict[bytes, int] = {}

    def add(self, workers: Sequence[bytes], projections: Matrix, factors: Sequence[float]) -> LongProducts:
        """Add the contributions of a round, refused ones as well, and return the products of these workers' sums.

        The sum of a site that was away is of older rounds than those of the others, with which it would be compared. So
        it becomes smaller in each round, and says something again after as many contributions as were missing.

        Args:
            workers: whose contributions they are; projections: float64 [R, PROJECTED].
            factors: by which each is scaled for its length.
        """
        for worker, projection, factor in zip(workers, projections, factors, strict=True):
            self._sums[worker] = DECAY * self._sums.get(worker, 0.0) + factor * projection
            self._counts[worker] = min(SETTLED, self._counts.get(worker, 0) + 1)
        for worker in self._sums.keys() - set(workers) if workers else ():
            self._sums[worker] = DECAY * self._sums[worker]
            self._counts[worker] -= 1
        self.keep([worker for worker, count in self._counts.items() if count > 0])
        sums = np.array([self._sums[worker] for worker in workers]).reshape(len(workers), PROJECTED)
        return LongProducts(sums @ sums.T, tuple(self._counts[worker] >= SETTLED for worker in workers))

    def rows(self) -> dict[bytes, tuple[int, Matrix]]:
        """Return of each worker how many contributions count, SETTLED at most, and their sum: float64 [PROJECTED]."""
        return {worker: (self._counts[worker], total) for worker, total in self._sums.items()}

    @classmethod
    def of(cls, rows: Mapping[bytes, tuple[int, Matrix]]) -> "SentSums":
        """Return the sums of some `rows`."""
        sums = cls()
        sums._counts = {worker: count for worker, (count, _) in rows.items()}
        sums._sums = {worker: total for worker, (_, total) in rows.items()}
        return sums

    def copy(self) -> "SentSums":
        """Return sums to which something can be added without a change of these."""
        return self.of(self.rows())

    def keep(self, workers: Collection[bytes]) -> None:
        """Forget all other workers."""
        for worker in [worker for worker in self._sums if worker not in workers]:
            del self._sums[worker], self._counts[worker]
