"""Finds pairs of nodes whose log-probabilities differ to one side, by less in each group than its tolerance.

The tolerance bounds the mean absolute difference of a group, so it leaves room for a shift of every token, and a shift
scales what the learner learns from a token. But honest noise has a sign: let D be the sum over a group's tokens of the
differences of two nodes, minus the allowed bias (`Thresholds.logprob_bias`) of each token. Whatever the groups before
were, the median of D is at most 0, because the noise of honest nodes is symmetric about a mean within the bias. So D is
positive with a probability of at most 1/2, and for a bet b between 0 and 1

    e = log10(1 + b) if D > 0, else log10(1 - b),          with E[10^e] <= (1 + b) / 2 + (1 - b) / 2 = 1.

The evidence is a CUSUM as in protocol/judging/evidence.py, in micro-decades, for each direction and each bet. A group
is one trial, because its tokens share a part of their noise. Only the sign counts: it needs no scale of the noise, and
nothing is added by exp(x D - x^2 D^2 / 2), the e-value of a symmetric D (de la Pena 1999), which gives at most 0.22
decades a group.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from typing import Annotated, ClassVar, Final

from pydantic import Field

from protocol.encoding import Record, Window
from protocol.identity.signing import Key
from protocol.limits import MIB
from protocol.proof import DECADE, ProofSpec
from roles.ports import NotFoundError, ObjectStore

LOGPROB_BIAS: Final = "logprob-bias"
"""Path of the evidence in the trainer's state."""

_SCORES: Final = ((51_152, -57_992), (176_091, -301_030), (273_001, -903_090))
"""log10(1 + b) and log10(1 - b) in micro-decades, rounded down, for the bets 1/8, 1/2 and 7/8."""

_LEVEL: Final = 9 * DECADE
"""Honest nodes are found in N groups with a probability of at most N * 10^-9."""

_EVIDENCES: Final = 2 * len(_SCORES)
"""Of each pair: for each direction, one of each bet."""


class PairEvidence(Record):
    """The evidence against a pair of nodes.

    Attributes:
        one, other: their keys, ascending.
        values: in micro-decades, for each bet: that `one` gives the larger values, then for each that `other` does.
        is_biased: whether one of them has exceeded the threshold.
    """

    kind: ClassVar[str] = "pair-evidence"
    one: Key
    other: Key
    values: Annotated[tuple[int, ...], Field(min_length=_EVIDENCES, max_length=_EVIDENCES)]
    is_biased: bool


class BiasEvidence(Record):
    """The evidence against all pairs.

    Attributes:
        next_window: the first that is not counted.
    """

    kind: ClassVar[str] = "bias-evidence"
    max_bytes: ClassVar[int] = 128 * MIB  # some hundred bytes for each pair of hundreds of validators
    max_items: ClassVar[int] = 1 << 23
    next_window: Window
    pairs: tuple[PairEvidence, ...]


GroupSums = dict[bytes, tuple[str, int, int]]
"""By each node that gives log-probabilities of a group: how it computes, their sum in millionths, and their number."""


class LogprobBias:
    """The evidence against the pairs of nodes that one trainer compares, in its state."""

    def __init__(self, state: ObjectStore) -> None:
        self._state = state
        self._next_window = 0
        self._pairs: dict[tuple[bytes, bytes], PairEvidence] = {}

    async def open(self) -> None:
        """Read the evidence of before a restart."""
        with suppress(NotFoundError):
            evidence = BiasEvidence.from_bytes(await self._state.get(LOGPROB_BIAS, BiasEvidence.max_bytes))
            self._next_window = evidence.next_window
            self._pairs = {(item.one, item.other): item for item in evidence.pairs}

    @property
    def biased_pairs(self) -> frozenset[frozenset[bytes]]:
        """The pairs that honest noise does not explain."""
        return frozenset(frozenset(pair) for pair, item in self._pairs.items() if item.is_biased)

    async def count(self, window: int, groups: Sequence[GroupSums], proof: ProofSpec, nodes: int) -> None:
        """Count the groups of a finished window, once: windows ascend, and one that is counted already is ignored.

        Args:
            nodes: how many there are to compare.
        """
        if window < self._next_window:
            return
        pairs = dict(self._pairs)
        for sums in groups:
            for pair in combinations(sorted(sums), 2):
                pairs[pair] = weigh_group(pairs.get(pair) or _unbiased(pair), sums, proof, nodes)
        record = BiasEvidence(next_window=window + 1, pairs=tuple(pairs.values()))
        await self._state.put(LOGPROB_BIAS, record.to_bytes())
        self._next_window, self._pairs = window + 1, pairs


def _unbiased(pair: tuple[bytes, bytes]) -> PairEvidence:
    return PairEvidence(one=pair[0], other=pair[1], values=(0,) * _EVIDENCES, is_biased=False)


def weigh_group(evidence: PairEvidence, sums: GroupSums, proof: ProofSpec, nodes: int) -> PairEvidence:
    """Return the evidence against a pair after a group that both have judged; see `LogprobBias.count`."""
    (one, one_sum, tokens), (other, other_sum, other_tokens) = sums[evidence.one], sums[evidence.other]
    if evidence.is_biased or tokens != other_tokens:
        return evidence
    allowed = proof.logprob_bounds(one, other)[1] * tokens
    exceeds = one_sum - other_sum > allowed, other_sum - one_sum > allowed
    added = [gain if exceeds_bias else loss for exceeds_bias in exceeds for gain, loss in _SCORES]
    values = tuple(max(0, before) + score for before, score in zip(evidence.values, added, strict=True))
    processes = _EVIDENCES * nodes * (nodes - 1) // 2
    threshold = _LEVEL + math.ceil(math.log10(max(1, processes)) * DECADE)
    return evidence.model_copy(update={"values": values, "is_biased": max(values) > threshold})
