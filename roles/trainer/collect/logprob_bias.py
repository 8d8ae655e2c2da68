"""Finds pairs of nodes whose log-probabilities differ to one side, by less in each group than its tolerance, or whose
rewards do, and validators that end rollouts where the trainer's own node finds no near tie.

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

The rewards that count of a group are bet on likewise, if the environment's are exact; equal sums are no trial. The one
that a node counts for a rollout is that of the rollout as this node draws it, whatever the miner has sent: it goes on
by itself from the first token that it draws otherwise. So which of two honest nodes has the higher one is symmetric.

Where a rollout ends early, the validator draws another token than the rollout's. Only one whose score is nearly as high
can be drawn by a node whose arithmetic differs a little. So the *lead* of the rollout's token over all others, as the
trainer's node computes it, is at most the margin that this node would find at the validator's token, and the table of
margins for the two arithmetics bounds how often that reaches a step (`weigh_ends`).
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from protocol import limits
from protocol.encoding import Record, Window
from protocol.errors import error_context
from protocol.identity.signing import Key
from protocol.judging.evidence import tally_values, weigh_tally
from protocol.proof import DECADE, ProofSpec, Thresholds
from roles.ports import NotFoundError, ObjectStore
from roles.trainer.spool import OTHER_VERSION
from roles.trainer.tensor_shards import RunSync

LOGPROB_BIAS: Final = "logprob-bias"
"""Path of the evidence in the trainer's state."""

_GAINS: Final = np.array([51_152, 176_091, 273_001])
_LOSSES: Final = np.array([-57_992, -301_030, -903_090])
"""log10(1 + b) and log10(1 - b) in micro-decades, rounded down, for the bets 1/8, 1/2 and 7/8."""

_SERIES: Final = 2 * len(_GAINS)  # of log-probabilities and of rewards
_LEVEL: Final = 9 * DECADE
"""Honest nodes are found in N groups with a probability of at most N * 10^-9."""
_LARGEST: Final = 100 * DECADE
_LARGEST_LEAD: Final = (1 << 31) - 1


class Computed(NamedTuple):
    """What a node computes of a group: how, the sum of its log-probabilities in millionths, their number, and the sum
    of the rewards that count in millionths; None if it is not comparable.
    """

    arithmetic: str
    logprobs: int
    tokens: int
    rewards: int | None = None


GroupSums = Mapping[bytes, Computed]
"""What each node computes of a group."""

EndEvidence = tuple[bytes, bytes, tuple[int, ...]]
"""A validator, the trainer's node, and what the ends of a group add to the evidence (`weigh_ends`)."""


class BiasEvidence(Record):
    """The evidence against the pairs of N nodes."""

    kind: ClassVar[str] = "bias-evidence"
    max_bytes: ClassVar[int] = 128 * limits.MIB
    next_window: Window
    nodes: Annotated[tuple[Key, ...], Field(max_length=2 * limits.MAX_KEYS)]
    # int32 little-endian [N, N, 2 bets], in micro-decades: that the first of two gives the larger log-probabilities,
    # and the larger rewards
    values: bytes
    ends: bytes  # int32 little-endian [N, MAX_ALTERNATIVES]: that a validator ends rollouts where nothing nearly ties
    biased: bytes  # bytes [N, N]: 1 for a pair whose evidence has exceeded the threshold

    @model_validator(mode="after")
    def _complete(self) -> "BiasEvidence":
        count = len(self.nodes)
        sizes = 4 * _SERIES * count**2, 4 * limits.MAX_ALTERNATIVES * count, count**2
        if tuple(map(len, (self.values, self.ends, self.biased))) != sizes:
            raise ValueError("not the evidence of each pair")
        return self


class LogprobBias:
    """The evidence against the pairs of nodes that one trainer compares, in its state."""

    def __init__(self, state: ObjectStore, run_sync: RunSync) -> None:
        self._state = state
        self._run_sync = run_sync
        self._evidence = BiasEvidence(next_window=0, nodes=(), values=b"", ends=b"", biased=b"")
        self.biased_pairs: frozenset[frozenset[bytes]] = frozenset()
        """The pairs that honest noise does not explain."""

    async def open(self) -> None:
        """Read the evidence of before a restart."""
        with suppress(NotFoundError), error_context(f"{LOGPROB_BIAS} {OTHER_VERSION}"):
            self._adopt(BiasEvidence.from_bytes(await self._state.get(LOGPROB_BIAS, BiasEvidence.max_bytes)))

    async def count(
        self, window: int, groups: Sequence[GroupSums], ends: Sequence[EndEvidence], proof: ProofSpec, nodes: int
    ) -> None:
        """Count the groups of a finished window, once: windows ascend, and one that is counted already is ignored."""
        if window >= self._evidence.next_window:
            evidence: BiasEvidence = await self._run_sync(add_groups, self._evidence, groups, ends, proof, nodes)
            evidence = evidence.model_copy(update={"next_window": window + 1})
            await self._state.put(LOGPROB_BIAS, evidence.to_bytes())
            self._adopt(evidence)

    def _adopt(self, evidence: BiasEvidence) -> None:
        self._evidence, nodes = evidence, evidence.nodes
        biased = np.frombuffer(evidence.biased, dtype=np.bool_).reshape(len(nodes), len(nodes))
        self.biased_pairs = frozenset(frozenset((nodes[one], nodes[other])) for one, other in np.argwhere(biased))


def add_groups(
    evidence: BiasEvidence, groups: Sequence[GroupSums], ends: Sequence[EndEvidence], proof: ProofSpec, nodes: int
) -> BiasEvidence:
    """Return the evidence after more groups, in their order; see `LogprobBias.count`."""
    keys = tuple(sorted({*evidence.nodes}.union(*groups, *(item[:2] for item in ends))))
    places, before = {key: place for place, key in enumerate(keys)}, len(evidence.nodes)
    old_rows = [places[key] for key in evidence.nodes]
    old_places = np.ix_(old_rows, old_rows)
    values = np.zeros((len(keys), len(keys), _SERIES), np.int64)
    values[old_places] = np.frombuffer(evidence.values, "<i4").reshape(before, before, _SERIES)
    of_ends = np.zeros((len(keys), limits.MAX_ALTERNATIVES), np.int64)
    of_ends[old_rows] = np.frombuffer(evidence.ends, "<i4").reshape(before, limits.MAX_ALTERNATIVES)
    largest = values.max(axis=2)
    for sums in (sums for sums in groups if len(sums) > 1):
        here = np.ix_(*[[places[key] for key in sums]] * 2)
        values[here] = _weigh(values[here], list(sums.values()), proof)
        largest[here] = np.maximum(largest[here], values[here].max(axis=2))
    for validator, trainer, added in ends:
        of_one = of_ends[places[validator]]
        of_one[: len(added)] = (np.maximum(of_one[: len(added)], 0) + added).clip(-1, _LARGEST)
        pair = places[validator], places[trainer]
        largest[pair] = max(largest[pair], of_one.max())
    processes = (_SERIES * nodes + limits.MAX_ALTERNATIVES) * (nodes - 1)
    biased = largest > _LEVEL + len(str(processes**100)) * DECADE // 100  # log10(processes), rounded up to hundredths
    biased[old_places] |= np.frombuffer(evidence.biased, dtype=np.bool_).reshape(before, before)
    return BiasEvidence(
        next_window=evidence.next_window,
        nodes=keys,
        values=values.astype("<i4").tobytes(),
        ends=of_ends.astype("<i4").tobytes(),
        biased=biased.tobytes(),
    )


def weigh_ends(ends: Sequence[int], leads: Sequence[bytes], row: Thresholds, *, has_filters: bool) -> tuple[int, ...]:
    """Return what the ends of a group's rollouts (`Judgement`) add to the evidence that its validator did not draw
    other tokens there, by the leads of their tokens (`CanaryNote`) and the row for both arithmetics. If the run has
    filters, a token that leads may not pass at the edge of one.
    """
    values = [np.frombuffer(data, "<i4") for data in leads]
    ends = ends or [len(item) for item in values]
    claimed = [np.where(np.arange(len(item)) == end, item, 0) for item, end in zip(values, ends, strict=False)]
    beyond = row.margin.beyond
    cap = beyond[min(1, len(beyond) - 1)] if has_filters else _LARGEST_LEAD
    margins = np.concatenate(claimed).clip(max=cap)
    return weigh_tally(tally_values(margins, beyond), row.margin)


def _weigh(values: NDArray[np.int64], sums: Sequence[Computed], proof: ProofSpec) -> NDArray[np.int64]:
    """Return the evidence of the nodes that have judged a group, after it: int64 [N, N, 2 bets]."""
    totals, tokens = np.array([item.logprobs for item in sums]), np.array([item.tokens for item in sums])
    rewards, has_rewards = np.array([item.rewards or 0 for item in sums]), [item.rewards is not None for item in sums]
    arithmetics = [item.arithmetic for item in sums]
    kinds = sorted(set(arithmetics))
    biases = np.array([[proof.logprob_bounds(one, other)[1] for other in kinds] for one in kinds])
    numbers = [kinds.index(arithmetic) for arithmetic in arithmetics]
    allowed = biases[np.ix_(numbers, numbers)] * tokens
    exceeds = (totals[:, None] - totals > allowed)[:, :, None]
    difference = np.where(np.logical_and.outer(has_rewards, has_rewards), rewards[:, None] - rewards, 0)[:, :, None]
    of_rewards = np.where(difference > 0, _GAINS, np.where(difference < 0, _LOSSES, 0))
    after = np.maximum(values, 0) + np.concatenate([np.where(exceeds, _GAINS, _LOSSES), of_rewards], axis=2)
    # Of those that do not even agree on how many tokens there are, one is wrong in another way.
    comparable = (tokens[:, None] == tokens)[:, :, None]
    result: NDArray[np.int64] = np.where(comparable, after.clip(max=_LARGEST), values)
    return result
