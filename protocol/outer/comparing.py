"""What a coordinator compares contributions by, in a round and with those of earlier rounds.

Each contribution is multiplied with the sum of all, once they are scaled down to the median length, which their heads
state: so the work for each site does not grow with the number of sites.

Whole contributions of many rounds would take as much memory for each site as the weights, many times. So what is kept
are *random projections*: each element is multiplied by a sign, and then all elements whose index in their part
is the same modulo `PROJECTED` are added up. The inner product of two projections is that of the contributions but for
an error of about 1 / sqrt(PROJECTED) of their lengths. The signs follow from a secret of the coordinator, so that no
site can choose a direction that its projection does not show. Two contributions of one round are compared by their
projections, too, where one of them is taken out of the sum. The more sites there are, the shorter are the projections
that are remembered: a drift that many sites may have is longer.

What is computed from the projections of many rounds is in protocol/outer/drift.py.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from itertools import islice, pairwise
from statistics import median_low
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from protocol.kernels.inner_products import Matrix, add_scaled, add_signed, dot, product
from protocol.outer.round_checks import RefusedContributionError, sender_digest
from protocol.outer.round_records import RoundContribution, RoundRules
from protocol.outer.shared_state import SharedState, ordered_map
from protocol.pseudogradient import Payload, read_head
from protocol.pseudogradient.arithmetic import Floats

Item = TypeVar("Item")
Projections = NDArray[np.float32]

PROJECTED: Final = 1 << 14
"""Numbers in a projection."""

REMEMBERED_ROUNDS: Final = 96
"""Rounds whose projections are remembered."""

REMEMBERED_NUMBERS: Final = 128 * PROJECTED
"""Numbers of all projections of such a round."""

_BLOCK: Final = 1 << 14
"""Elements of each contribution that are multiplied at a time, to fit in a cache."""

_CHUNK: Final = 16 * _BLOCK
"""Elements of each contribution that one thread compares at a time, or a 64th of the part if that is more."""

_DECODED_BYTES: Final = 1 << 30
"""Memory for the values of a part: where those of all contributions need more, each is decoded twice."""


@dataclass(frozen=True)
class Comparison:
    """The contributions of a round."""

    lengths: Matrix  # L2 norms: float64 [R]
    # inner product of each with the sum of all, once they are scaled down to the median length, itself scaled likewise:
    # float64 [R]
    with_all: Matrix
    projections: Matrix  # float64 [R, PROJECTED]
    local_steps: int  # of the round, by its rules
    stream: int = 0  # which of the streams they have


def median_length(lengths: Sequence[float]) -> float:
    """Return the lower median of those that are not 0, or 0: sites that send nothing have no say in it."""
    return median_low([length for length in lengths if length > 0] or [0.0])


def length_factors(lengths: Sequence[float]) -> list[float]:
    """Return the factors that scale contributions down to the median length."""
    bound = median_length(lengths)
    return [min(1.0, bound / length) if length > 0 else 1.0 for length in lengths]


def projection_size(sites: int) -> int:
    """Return how many numbers of each projection are remembered: PROJECTED of up to 128 sites, fewer of more."""
    return min(PROJECTED, 1 << (REMEMBERED_NUMBERS // max(1, sites)).bit_length() - 1)


def shortened(projections: Projections, size: int) -> Projections:
    """Return projections, float32 [R, P], as those with `size` numbers, float32 [R, min(P, size)], which divides P: as
    the elements have the same signs in both, a number of these is a sum of some of those.
    """
    rows, numbers = projections.shape
    if numbers <= size:
        return projections
    result: Projections = reduce(np.add, projections.reshape(rows, numbers // size, size).swapaxes(0, 1))
    return result


@dataclass(frozen=True)
class SentRound:
    """What the sites sent in a round."""

    workers: tuple[bytes, ...]  # those whose contribution was long enough to be compared, in ascending order
    # of their contributions, each scaled down to the median length: float32 [R, P], P <= PROJECTED
    projections: Projections
    # the workers whose contribution disagreed with those of the others in that round
    disagreeing: frozenset[bytes] = frozenset()
    stream: int = 0  # which of the streams they sent. Projections of different streams have nothing in common

    def row(self, worker: bytes) -> Matrix:
        """Return the projection of a site's contribution: float64 [P]."""
        row: Matrix = self.projections[self._places[worker]].astype(np.float64)
        return row

    def relative_length(self, worker: bytes) -> float:
        """Return the length of a site's contribution as a share of the longest one's."""
        return self._relative_lengths[self._places[worker]]

    @cached_property
    def _places(self) -> dict[bytes, int]:
        return {worker: place for place, worker in enumerate(self.workers)}

    @cached_property
    def _relative_lengths(self) -> list[float]:
        lengths = [math.sqrt(dot(row, row)) for row in self.projections]
        longest = max(lengths) or 1.0
        return [length / longest for length in lengths]

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
    """Sums over some sites of a round, from which one can be taken out: so the work grows with their number alone."""

    sent: SentRound
    workers: frozenset[bytes]  # these sites
    total: Matrix  # of what they sent: float64 [P]
    squares: Matrix  # of the squares of its elements: float64 [P]
    lengths: float = 0.0  # of the lengths
    square_lengths: float = 0.0  # of the squared lengths
    squares_of_squares: float = 0.0  # of the squared lengths of the squares

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
        """Return the squared length of what is common in the mean, and its variance if the sites agreed by chance: the
        mean cosine of two sites times the squared mean length, so that shorter contributions make it no smaller than
        the mean.
        """
        pairs = self.lengths * self.lengths - self.square_lengths
        if pairs <= 0:
            return 0.0, 0.0
        length = self.lengths / len(self.workers)
        scale = length * length / pairs
        variance = max(0.0, dot(self.squares, self.squares) - self.squares_of_squares)
        return scale * (dot(self.total, self.total) - self.square_lengths), 2 * scale * scale * variance


def project(state: SharedState, rules: RoundRules, secret: bytes, payload: Payload) -> Matrix:
    """Decode a payload, and so check it (MalformedError, LimitError, ContributionError), and return the projection of
    its values: float64 [PROJECTED]. One part is in memory at a time. The signs follow from at least 16 secret bytes of
    the coordinator.
    """
    key, stream = int.from_bytes(secret[:16], "little"), state.stream_number(rules)
    numbers = np.zeros(PROJECTED)
    for number, (part, decode) in enumerate(state.values_of([payload], rules)):
        random = np.random.Generator(np.random.Philox(key=key, counter=(stream << 32 | number) << 192))
        bits = np.frombuffer(bytearray(random.bytes(-(-part.elements // 8))), np.uint8)
        for values in decode():
            add_signed(numbers, values, bits)
    return numbers


def check_payload(
    state: SharedState, rules: RoundRules, secret: bytes, contribution: RoundContribution, payload: Payload
) -> Matrix:
    """Check a payload against its contribution (ProtocolError), and return the projection of its values (`project`)."""
    head = read_head(payload[0], state.stream_parts(rules))
    if head.sender != sender_digest(contribution.opening, contribution.worker):
        raise RefusedContributionError("a payload that another site made, or that was made for another round")
    if head.coding != rules.coding:
        raise RefusedContributionError("values of another kind than the round's rules say")
    if sum(head.file_sizes) != contribution.payload.total:
        raise RefusedContributionError("another size than the contribution states")
    if math.sqrt(head.squared_norm) != contribution.norm:
        raise RefusedContributionError("another norm than the contribution states")
    return project(state, rules, secret, payload)


def part_products(
    state: SharedState,
    payloads: Sequence[Payload],
    rules: RoundRules,
    threads: int = 1,
    places: Collection[int] | None = None,
) -> Matrix:
    """Return the product of each contribution with the sum of all, once they are scaled down to the median length, in
    each part or in some: float64 [P, R]. The payloads were checked before; the number of threads changes no bit.
    """
    factors, result = length_factors(_lengths(state, payloads, rules)), []
    largest = max((part.elements for part in state.stream_parts(rules)), default=0)
    at_once = min(len(payloads), max(threads, _DECODED_BYTES // max(1, 4 * largest)))
    with ordered_map(threads) as each:
        for part, decode in state.values_of(payloads, rules, each, at_once, places):
            size = max(_CHUNK, -(-part.elements // (64 * _BLOCK)) * _BLOCK)
            chunks = [*pairwise([*range(0, part.elements, size), part.elements])]
            whole = [[*decode()]] if at_once == len(payloads) else []
            total, products = np.zeros(part.elements), list[float]()
            scales = _batches(iter(factors), at_once)
            for rows, of_rows in zip(whole or _batches(decode(), at_once), scales, strict=True):
                list(each(partial(_add_chunk, total, rows, of_rows), chunks))
            for rows in whole or _batches(decode(), at_once):
                own = np.zeros(len(rows))
                for of_chunk in each(partial(_chunk_products, total, rows), chunks):
                    own += of_chunk
                products.extend(own)
            result.append(products)
    return np.array(result).reshape(len(result), len(payloads))


def _batches(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    while batch := list(islice(items, size)):
        yield batch


def _blocks(chunk: tuple[int, int]) -> Iterator[slice]:
    return (slice(*ends) for ends in pairwise([*range(*chunk, _BLOCK), chunk[1]]))


def _add_chunk(total: Matrix, rows: Sequence[Floats], factors: Sequence[float], chunk: tuple[int, int]) -> None:
    for block in _blocks(chunk):
        for factor, values in zip(factors, rows, strict=True):
            add_scaled(total[block], values[block], factor)


def _chunk_products(total: Matrix, rows: Sequence[Floats], chunk: tuple[int, int]) -> Matrix:
    """Return the products of the rows with their scaled sum in a chunk: float64 [R]."""
    products = np.zeros(len(rows))
    for block in _blocks(chunk):
        products += [product(values[block], total[block]) for values in rows]
    return products


def _lengths(state: SharedState, payloads: Sequence[Payload], rules: RoundRules) -> list[float]:
    parts = state.stream_parts(rules)
    return [math.sqrt(read_head(payload[0], parts).squared_norm) for payload in payloads]


def comparison_of(
    state: SharedState, payloads: Sequence[Payload], rules: RoundRules, projections: Sequence[Matrix], products: Matrix
) -> Comparison:
    """Return the comparison of contributions by their projections and by the products of all their parts."""
    lengths = _lengths(state, payloads, rules)
    with_all = np.zeros(len(payloads))
    with np.errstate(over="ignore", invalid="ignore"):  # of what a site made up
        for own in products:
            with_all += own
    return Comparison(
        np.array(lengths),
        np.array(length_factors(lengths)) * with_all,
        np.array(projections).reshape(len(payloads), PROJECTED),
        rules.local_steps,
        state.stream_number(rules),
    )


def compare(
    state: SharedState, payloads: Sequence[Payload], rules: RoundRules, secret: bytes, threads: int = 1
) -> Comparison:
    """Compare the contributions of a round, as a coordinator does that is alone (`project`, `part_products`)."""
    with ordered_map(threads) as each:
        projections = list(each(partial(project, state, rules, secret), payloads))
    return comparison_of(state, payloads, rules, projections, part_products(state, payloads, rules, threads))


NOTHING_SENT: Final = SentRound((), np.empty((0, PROJECTED), np.float32))
"""What the sites sent in a round without contributions."""


class SentRounds:
    """What the sites sent in the newest rounds, at most REMEMBERED_ROUNDS, in their order. All have projections of one
    size, that of the round with the most sites.
    """

    def __init__(self, rounds: Sequence[SentRound] = ()) -> None:
        newest = rounds[-REMEMBERED_ROUNDS:]
        size = min((sent.projections.shape[1] for sent in newest), default=PROJECTED)
        self.rounds = tuple(
            sent if sent.projections.shape[1] == size else replace(sent, projections=shortened(sent.projections, size))
            for sent in newest
        )

    def after(self, sent: SentRound) -> "SentRounds":
        """Return these rounds with a new one."""
        return SentRounds((*self.rounds, sent))
