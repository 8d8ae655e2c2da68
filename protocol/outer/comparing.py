"""What a coordinator compares contributions by, in a round and with those of earlier rounds.

Each contribution is multiplied with the sum of all, once they are scaled down to the median length, which their heads
state: so the work for each site does not grow with the number of sites.

Whole contributions of many rounds would take as much memory for each site as the weights, many times. So what is kept
are *random projections*: each element is multiplied by a sign, and then all elements whose index in their part
is the same modulo `PROJECTED` are added up. The inner product of two projections is that of the contributions but for
an error of about 1 / sqrt(PROJECTED) of their lengths. The signs follow from a secret of the coordinator, so that no
site can choose a direction that its projection does not show. Two contributions of one round are compared by their
projections, too, where one of them is taken out of the sum.

What is computed from the projections of many rounds is in protocol/outer/drift.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from statistics import median_low
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.kernels.inner_products import Matrix, dot, row_products
from protocol.outer.round_records import RoundRules
from protocol.outer.shared_state import SharedState, ordered_map
from protocol.pseudogradient import parts_of, read_head
from protocol.pseudogradient.arithmetic import Floats

Projections = NDArray[np.float32]

PROJECTED: Final = 1 << 14
"""Numbers in a projection; also the elements of each contribution that are multiplied at a time, to fit in a cache."""

_CHUNK: Final = 16 * PROJECTED
"""Elements of each contribution that one thread compares at a time, or a 64th of the part if that is more."""

REMEMBERED_ROUNDS: Final = 96
"""Rounds whose projections are remembered."""


@dataclass(frozen=True)
class Comparison:
    """The contributions of a round.

    Attributes:
        lengths: L2 norms: float64 [R].
        with_all: inner product of each with the sum of all, once they are scaled down to the median length, itself
            scaled likewise: float64 [R].
        projections: float64 [R, PROJECTED].
        local_steps: of the round, by its rules.
        stream: which of the streams they have.
    """

    lengths: Matrix
    with_all: Matrix
    projections: Matrix
    local_steps: int
    stream: int = 0


def median_length(lengths: Sequence[float]) -> float:
    """Return the median of those that are not 0, or 0: sites that send nothing have no say in it.

    Of an even number it is the lower of the two in the middle.
    """
    return median_low([length for length in lengths if length > 0] or [0.0])


def length_factors(lengths: Sequence[float]) -> list[float]:
    """Return the factors that scale contributions down to the median length."""
    bound = median_length(lengths)
    return [min(1.0, bound / length) if length > 0 else 1.0 for length in lengths]


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

    def relative_length(self, worker: bytes) -> float:
        """Return the length of a site's contribution as a share of the longest one's."""
        return self._lengths[self.workers.index(worker)] / (max(self._lengths) or 1.0)

    @cached_property
    def _lengths(self) -> list[float]:
        rows = self.projections.astype(np.float64)
        return [math.sqrt(dot(row, row)) for row in rows]

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


def compare(
    state: SharedState, payloads: Sequence[bytes], rules: RoundRules, secret: bytes, threads: int = 1
) -> Comparison:
    """Compare the contributions of a round.

    Args:
        state: with which the round began; rules: of the round.
        payloads: which were checked before.
        secret: of the coordinator, for the signs: at least 16 bytes.
        threads: that compute. Their number changes no bit of the result.
    """
    parts = parts_of({name: tensor.shape for name, tensor in state.stream(rules).items()})
    lengths = [math.sqrt(read_head(payload, parts).squared_norm) for payload in payloads]
    factors, stream = np.array(length_factors(lengths)), state.stream_number(rules)
    with_all, projections = np.zeros(len(payloads)), np.zeros((len(payloads), PROJECTED))
    with ordered_map(threads) as each:
        for number, (part, rows) in enumerate(state.values_of(payloads, rules, each)):
            random = np.random.Philox(key=int.from_bytes(secret[:16], "little"), counter=(stream << 32 | number) << 192)
            bits = np.frombuffer(np.random.Generator(random).bytes(-(-part.elements // 8)), np.uint8)
            size = max(_CHUNK, -(-part.elements // (64 * PROJECTED)) * PROJECTED)
            chunks = pairwise([*range(0, part.elements, size), part.elements])
            for products, projected in each(partial(_compare_chunk, rows, factors, bits), chunks):
                with_all += products
                projections += projected
    return Comparison(np.array(lengths), factors * with_all, projections, rules.local_steps, stream)


def _compare_chunk(
    rows: Sequence[Floats], factors: Matrix, bits: NDArray[np.uint8], chunk: tuple[int, int]
) -> tuple[Matrix, Matrix]:
    """Return the products with the scaled sum, float64 [R], and the projections, float64 [R, PROJECTED], of a chunk."""
    products, projections = np.zeros(len(rows)), np.zeros((len(rows), PROJECTED))
    for begin, end in pairwise([*range(*chunk, PROJECTED), chunk[1]]):
        block = np.array([values[begin:end] for values in rows], np.float64)
        total = np.zeros(end - begin)
        for factor, own in zip(factors, block, strict=True):
            total += factor * own
        products += row_products(block, total)
        signs = 2.0 * np.unpackbits(bits[begin // 8 : -(-end // 8)])[: end - begin] - 1.0
        projections[:, : end - begin] += signs * block
    return products, projections


NOTHING_SENT: Final = SentRound((), np.empty((0, PROJECTED), np.float32))
"""What the sites sent in a round without contributions."""


class SentRounds:
    """What the sites sent in the newest rounds, at most REMEMBERED_ROUNDS, in their order."""

    def __init__(self, rounds: Sequence[SentRound] = ()) -> None:
        self.rounds = tuple(rounds[-REMEMBERED_ROUNDS:])

    def after(self, sent: SentRound) -> "SentRounds":
        """Return these rounds with a new one."""
        return SentRounds((*self.rounds, sent))
