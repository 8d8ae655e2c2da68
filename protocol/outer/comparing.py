"""What a coordinator compares contributions by: inner products in a round, and what each site sent in earlier rounds.

Whole contributions of many rounds would take as much memory for each site as the weights, many times. So those of older
rounds are *random projections*: each element is multiplied by a sign, and then all elements whose index in their part
is the same modulo `PROJECTED` are added up. The inner product of two projections is that of the contributions but for
an error of about 1 / sqrt(PROJECTED) of their lengths. The signs follow from a secret of the coordinator, so that no
site can choose a direction that its projection does not show.

What is computed from the projections of many rounds is in protocol/outer/drift.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.kernels.inner_products import Matrix, dot, inner_products
from protocol.outer.round_records import RoundRules
from protocol.outer.shared_state import SharedState
from protocol.pseudogradient import decode

Projections = NDArray[np.float32]

PROJECTED: Final = 1 << 14
"""Numbers in a projection; also the elements of each contribution that are multiplied at a time, to fit in a cache."""

REMEMBERED_ROUNDS: Final = 96
"""Rounds whose projections are remembered."""


@dataclass(frozen=True)
class Comparison:
    """The contributions of a round.

    Attributes:
        products: their inner products with each other: float64 [R, R].
        projections: float64 [R, PROJECTED].
        local_steps: of the round, by its rules.
        stream: which of the streams they have.
    """

    products: Matrix
    projections: Matrix
    local_steps: int
    stream: int = 0


@dataclass(frozen=True)
class SentRound:
    """What the sites sent in a round.

    Attributes:
        workers: those whose contribution was long enough to be compared, in ascending order.
        projections: of their contributions, each scaled down to the median length: float32 [R, PROJECTED].
        disagreeing: the workers whose contribution disagreed with those of the others in that round.
        stream: which of the streams they sent. Projections of different streams have nothing in common.
    """

    workers: tuple[bytes, ...]
    projections: Projections
    disagreeing: frozenset[bytes] = frozenset()
    stream: int = 0

    def row(self, worker: bytes) -> Matrix:
        """Return the projection of a site's contribution: float64 [PROJECTED]."""
        row: Matrix = self.projections[self.workers.index(worker)].astype(np.float64)
        return row

    @cached_property
    def sums(self) -> "SiteSums":
        """The sums over all sites that agreed with the others."""
        nothing = np.zeros(self.projections.shape[1])
        workers = frozenset(self.workers) - self.disagreeing
        sums = SiteSums(self, workers, nothing, nothing)
        for worker in sorted(workers):
            sums = sums.plus(worker, 1)
        return sums


@dataclass(frozen=True)
class SiteSums:
    """Sums over some sites of a round, from which a site can be taken out: so the work grows with their number alone.

    Attributes:
        workers: these sites.
        total: of what they sent; squares: of the squares of its elements: float64 [PROJECTED].
        lengths: of the lengths; square_lengths: of the squared lengths.
        squares_of_squares: of the squared lengths of the squares.
    """

    sent: SentRound
    workers: frozenset[bytes]
    total: Matrix
    squares: Matrix
    lengths: float = 0.0
    square_lengths: float = 0.0
    squares_of_squares: float = 0.0

    def without(self, *workers: bytes) -> "SiteSums":
        """Return the sums over the others than some sites."""
        rest = self
        for worker in sorted(self.workers.intersection(workers)):
            rest = rest.plus(worker, -1)
        return replace(rest, workers=self.workers.difference(workers))

    def plus(self, worker: bytes, sign: int) -> "SiteSums":
        """Return the sums with what a site sent added or, with -1, subtracted."""
        row = self.sent.row(worker)
        square, square_length = row * row, dot(row, row)
        return replace(
            self,
            total=self.total + sign * row,
            squares=self.squares + sign * square,
            lengths=self.lengths + sign * math.sqrt(square_length),
            square_lengths=self.square_lengths + sign * square_length,
            squares_of_squares=self.squares_of_squares + sign * dot(square, square),
        )

    def agreement(self) -> tuple[float, float]:
        """Return the squared length of what is common in the mean, and its variance if the sites agreed by chance.

        It is the mean cosine of two of the sites times the squared mean length, so sites with fewer local steps, whose
        contributions are shorter, make it no smaller than the mean itself.
        """
        pairs = self.lengths * self.lengths - self.square_lengths
        if pairs <= 0:
            return 0.0, 0.0
        scale = (self.lengths / len(self.workers)) ** 2 / pairs
        variance = max(0.0, dot(self.squares, self.squares) - self.squares_of_squares)
        return scale * (dot(self.total, self.total) - self.square_lengths), 2 * scale * scale * variance


def compare(state: SharedState, payloads: Sequence[bytes], rules: RoundRules, secret: bytes) -> Comparison:
    """Compare the contributions of a round.

    Args:
        state: with which the round began; rules: of the round.
        secret: of the coordinator, for the signs: at least 16 bytes.
    """
    products, projections = np.zeros((len(payloads),) * 2), np.zeros((len(payloads), PROJECTED))
    stream, number_of_stream = state.stream(rules), state.stream_number(rules)
    decoders = [decode(payload, stream, state.digests.weights) for payload in payloads]
    for number, rows in enumerate(zip(*decoders, strict=True)):
        size = rows[0][1].size
        random = np.random.Philox(
            key=int.from_bytes(secret[:16], "little"), counter=(number_of_stream << 32 | number) << 192
        )
        bits = np.frombuffer(np.random.Generator(random).bytes(-(-size // 8)), np.uint8)
        for begin, end in pairwise([*range(0, size, PROJECTED), size]):
            block = np.array([values[begin:end] for _, values in rows], np.float64)
            products += inner_products(block)
            signs = 2.0 * np.unpackbits(bits[begin // 8 : -(-end // 8)])[: end - begin] - 1.0
            projections[:, : end - begin] += signs * block
    return Comparison(products, projections, rules.local_steps, number_of_stream)


NOTHING_SENT: Final = SentRound((), np.empty((0, PROJECTED), np.float32))
"""What the sites sent in a round without contributions."""


class SentRounds:
    """What the sites sent in the newest rounds, at most REMEMBERED_ROUNDS, in their order."""

    def __init__(self, rounds: Sequence[SentRound] = ()) -> None:
        self.rounds = tuple(rounds[-REMEMBERED_ROUNDS:])

    def after(self, sent: SentRound) -> "SentRounds":
        """Return these rounds with a new one."""
        return SentRounds((*self.rounds, sent))
