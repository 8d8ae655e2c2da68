"""Finds pairs of nodes whose log-probabilities differ to one side, by less in each group than its tolerance.

The tolerance bounds the mean absolute difference of a group, so it leaves room for a shift of every token, and a shift
scales what the learner learns from a token. But honest noise has a sign: let D be the sum over a group's tokens of the
differences of two nodes, minus the allowed bias (`Thresholds.logprob_bias`) of each token. Whatever the groups before
were, the median of D is at most 0, because the noise of honest nodes is symmetric about a mean within the bias. So D is
positive with a probability of at most 1/2, and for a bet b between 0 and 1

    e = log10(1 + b) if D > 0, else log10(1 - b),          with E[10^e] <= (1 + b) / 2 + (1 - b) / 2 = 1.

The evidence is a CUSUM as in protocol/judging/evidence.py, in micro-decades, for each direction and each bet. A group
is one trial, because its tokens share a part of their noise. Only the sign counts, so that no scale of the noise is
needed. The self-normalized e-value of a symmetric D, exp(x D - x^2 D^2 / 2) (de la Pena 1999), gives at most e^(1/2) a
group, 0.22 decades, where a sign gives up to 0.27.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from protocol import limits
from protocol.encoding import Record, Window
from protocol.identity.signing import Key
from protocol.proof import DECADE, ProofSpec
from roles.ports import NotFoundError, ObjectStore
from roles.trainer.tensor_shards import RunSync

LOGPROB_BIAS: Final = "logprob-bias"
"""Path of the evidence in the trainer's state."""

_GAINS: Final = np.array([51_152, 176_091, 273_001])
_LOSSES: Final = np.array([-57_992, -301_030, -903_090])
"""log10(1 + b) and log10(1 - b) in micro-decades, rounded down, for the bets 1/8, 1/2 and 7/8."""

_BETS: Final = len(_GAINS)
_LEVEL: Final = 9 * DECADE
"""Honest nodes are found in N groups with a probability of at most N * 10^-9."""
_LARGEST: Final = 100 * DECADE

GroupSums = Mapping[bytes, tuple[str, int, int]]
"""By each node that gives log-probabilities of a group: how it computes, their sum in millionths, and their number."""


class BiasEvidence(Record):
    """The evidence against the pairs of N nodes."""

    kind: ClassVar[str] = "bias-evidence"
    max_bytes: ClassVar[int] = 64 * limits.MIB
    next_window: Window
    nodes: Annotated[tuple[Key, ...], Field(max_length=2 * limits.MAX_KEYS)]
    values: bytes  # int32 little-endian [N, N, bets], in micro-decades: that the first of two gives the larger values
    biased: bytes  # bytes [N, N]: 1 for a pair whose evidence has exceeded the threshold

    @model_validator(mode="after")
    def _complete(self) -> "BiasEvidence":
        pairs = len(self.nodes) ** 2
        if len(self.values) != 4 * _BETS * pairs or len(self.biased) != pairs:
            raise ValueError("not the evidence of each pair")
        return self


class LogprobBias:
    """The evidence against the pairs of nodes that one trainer compares, in its state."""

    def __init__(self, state: ObjectStore, run_sync: RunSync) -> None:
        self._state = state
        self._run_sync = run_sync
        self._evidence = BiasEvidence(next_window=0, nodes=(), values=b"", biased=b"")
        self.biased_pairs: frozenset[frozenset[bytes]] = frozenset()
        """The pairs that honest noise does not explain."""

    async def open(self) -> None:
        """Read the evidence of before a restart."""
        with suppress(NotFoundError):
            self._adopt(BiasEvidence.from_bytes(await self._state.get(LOGPROB_BIAS, BiasEvidence.max_bytes)))

    async def count(self, window: int, groups: Sequence[GroupSums], proof: ProofSpec, nodes: int) -> None:
        """Count the groups of a finished window, once: windows ascend, and one that is counted already is ignored."""
        if window >= self._evidence.next_window:
            evidence: BiasEvidence = await self._run_sync(add_groups, self._evidence, groups, proof, nodes)
            evidence = evidence.model_copy(update={"next_window": window + 1})
            await self._state.put(LOGPROB_BIAS, evidence.to_bytes())
            self._adopt(evidence)

    def _adopt(self, evidence: BiasEvidence) -> None:
        self._evidence, nodes = evidence, evidence.nodes
        biased = np.frombuffer(evidence.biased, dtype=np.bool_).reshape(len(nodes), len(nodes))
        self.biased_pairs = frozenset(frozenset((nodes[one], nodes[other])) for one, other in np.argwhere(biased))


def add_groups(evidence: BiasEvidence, groups: Sequence[GroupSums], proof: ProofSpec, nodes: int) -> BiasEvidence:
    """Return the evidence after more groups, in their order; see `LogprobBias.count`."""
    keys = tuple(sorted({*evidence.nodes}.union(*groups)))
    places = {key: place for place, key in enumerate(keys)}
    old_places = np.ix_(*[[places[key] for key in evidence.nodes]] * 2)
    values = np.zeros((len(keys), len(keys), _BETS), np.int64)
    values[old_places] = np.frombuffer(evidence.values, "<i4").reshape(len(evidence.nodes), len(evidence.nodes), _BETS)
    largest = values.max(axis=2)
    for sums in (sums for sums in groups if len(sums) > 1):
        here = np.ix_(*[[places[key] for key in sums]] * 2)
        values[here] = _weigh(values[here], list(sums.values()), proof)
        largest[here] = np.maximum(largest[here], values[here].max(axis=2))
    processes = _BETS * nodes * (nodes - 1)
    biased = largest > _LEVEL + math.ceil(math.log10(max(1, processes)) * DECADE)
    biased[old_places] |= np.frombuffer(evidence.biased, dtype=np.bool_).reshape(
        len(evidence.nodes), len(evidence.nodes)
    )
    return BiasEvidence(
        next_window=evidence.next_window, nodes=keys, values=values.astype("<i4").tobytes(), biased=biased.tobytes()
    )


def _weigh(values: NDArray[np.int64], sums: Sequence[tuple[str, int, int]], proof: ProofSpec) -> NDArray[np.int64]:
    """Return the evidence of the nodes that have judged a group, after it: int64 [N, N, bets]."""
    totals, tokens = np.array([total for _, total, _ in sums]), np.array([count for _, _, count in sums])
    arithmetics = [arithmetic for arithmetic, _, _ in sums]
    kinds = sorted(set(arithmetics))
    biases = np.array([[proof.logprob_bounds(one, other)[1] for other in kinds] for one in kinds])
    numbers = [kinds.index(arithmetic) for arithmetic in arithmetics]
    allowed = biases[np.ix_(numbers, numbers)] * tokens
    exceeds = totals[:, None] - totals > allowed
    after = np.maximum(values, 0) + np.where(exceeds[:, :, None], _GAINS, _LOSSES)
    # Of those that do not even agree on how many tokens there are, one is wrong in another way.
    comparable = (tokens[:, None] == tokens)[:, :, None]
    result: NDArray[np.int64] = np.where(comparable, after.clip(max=_LARGEST), values)
    return result
