"""What a coordinator compares contributions by: inner products in a round, and what each site sent in earlier rounds.

Whole contributions of many rounds would take as much memory for each site as the weights, many times. So those of older
rounds are *random projections*: each element is multiplied by a sign, and then all elements whose index in their part
is the same modulo `PROJECTED` are added up. The inner product of two projections is that of the contributions but for
an error of about 1 / sqrt(PROJECTED) of their lengths. The signs follow from a secret of the coordinator, so that no
site can choose a direction that its projection does not show.

What is computed from the projections of many rounds is in protocol/outer/drift.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.kernels.inner_products import Matrix, inner_products
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

    @cached_property
    def products(self) -> tuple[Matrix, Matrix]:
        """Inner products of the projections with each other, and those of their squares: float64 [R, R]."""
        rows = self.projections.astype(np.float64)
        return inner_products(rows), inner_products(rows * rows)


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
