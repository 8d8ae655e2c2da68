"""Which groups enough validators accept with the same log-probabilities, and which miners' windows their evidence
together refuses. Pure functions of verdicts."""

from collections import Counter
from collections.abc import Callable, Container, Sequence, Set
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from protocol.judging.evidence import Counts, surprisal_threshold, window_surprisal
from protocol.judging.verdict import Judgement, Reason, Verdict
from protocol.proof import Thresholds
from roles.trainer.verified_batch import GroupOutcome, valid_logprobs

LOGPROBS_DISAGREE = "logprobs-disagree"
"""The reason against a group for whose tokens the validators that accept it give different log-probabilities."""

BELOW_DEPOSIT = "below-deposit"
"""The reason against a group of a miner that earns nothing by the ledgers of validators that accept it."""


LogprobTolerance = Callable[[str, str], float]
"""Returns the largest mean absolute difference of log-probabilities that agree, for the arithmetics of two nodes."""


@dataclass(frozen=True)
class Opinion:
    """A validator's judgement on a group."""

    judgement: Judgement
    validator: bytes
    arithmetic: str  # how the validator computed
    pays: bool = True  # whether the miner earns something by its ledger


@dataclass(frozen=True)
class Decision:
    """What the validators' verdicts decide about one group."""

    # digest of the commitment that promises it, its index there, and SHA-256 of its frame
    group: tuple[bytes, int, bytes]
    accepting: tuple[Judgement, ...]  # the judgements that accept it and agree on its log-probabilities
    reason: str  # why it is not accepted; empty if it is accepted or pending
    pending: bool  # whether a verdict that may still come could change this
    dissenting: tuple[Judgement, ...] = ()  # the other judgements that accept it
    validators: tuple[bytes, ...] = ()  # those of `accepting`

    def outcome(self, status: str) -> GroupOutcome:
        """Return the group's entry for the outcome log."""
        commitment, index, digest = self.group
        return GroupOutcome(commitment=commitment, index=index, digest=digest, status=status)


def decide(
    verdicts: Sequence[Verdict],
    quorum: int,
    outstanding: Set[bytes],
    tolerance: LogprobTolerance,
    paying: Container[bytes],
    judges_of: Callable[[int], Set[bytes]],
) -> list[Decision]:
    """Decide about every judged group of one miner's window.

    A group counts as the validators judge it to which it was dealt. What others say of it decides nothing: validators
    that lie together could otherwise accept every group, and not only those of which all judges lie.

    What earns nothing is not used: with any number of new keys, a miner could show the groups of those that it likes.

    Args:
        verdicts: at most one from each validator.
        quorum: how many validators must accept a group.
        outstanding: the validators that may still give a verdict.
        paying: the validators by whose ledgers the miner earns something.
        judges_of: returns the validators to which a group (its index) was dealt.
    """
    opinions_by_group: dict[tuple[bytes, int, bytes], list[Opinion]] = {}
    for verdict in verdicts:
        for judgement in verdict.judgements:
            group = (verdict.commitment, judgement.index, judgement.digest)
            pays = verdict.validator in paying
            opinion = Opinion(judgement, verdict.validator, verdict.validator_arithmetic, pays)
            opinions_by_group.setdefault(group, []).append(opinion)
    decisions = []
    for group, all_opinions in sorted(opinions_by_group.items()):
        judges = judges_of(group[1])
        opinions = [opinion for opinion in all_opinions if opinion.validator in judges]
        awaited = len(outstanding & judges)
        accepting = [opinion for opinion in opinions if opinion.judgement.accepted and opinion.pays]
        agreeing, others = split_by_logprobs(accepting, tolerance)
        contested = len(split_by_logprobs(others, tolerance)[0]) >= quorum
        reasons = Counter(
            opinion.judgement.reason or BELOW_DEPOSIT
            for opinion in opinions
            if opinion.judgement.reason or not opinion.pays
        )
        has_quorum = len(agreeing) >= quorum
        can_have_quorum = len(agreeing) + awaited >= quorum and not contested
        if len(accepting) + awaited >= quorum and not can_have_quorum:
            main_reason = LOGPROBS_DISAGREE
        else:
            main_reason = reasons.most_common(1)[0][0] if reasons else "no-quorum"
        decisions.append(
            Decision(
                group=group,
                accepting=tuple(opinion.judgement for opinion in agreeing),
                reason="" if can_have_quorum else main_reason,
                pending=can_have_quorum and not has_quorum,
                dissenting=tuple(opinion.judgement for opinion in others),
                validators=tuple(opinion.validator for opinion in agreeing),
            )
        )
    return decisions


def split_by_logprobs(accepting: Sequence[Opinion], tolerance: LogprobTolerance) -> tuple[list[Opinion], list[Opinion]]:
    """Return the largest set of opinions found whose log-probabilities agree with each other, and the others.

    An opinion whose values cannot be log-probabilities agrees with none.

    Args:
        accepting: opinions on one group that accept it.
    """
    numbers_by_values: dict[tuple[str, bytes], list[int]] = {}  # equal values are compared once
    for number, opinion in enumerate(accepting):
        numbers_by_values.setdefault((opinion.arithmetic, opinion.judgement.logprobs), []).append(number)
    counts = np.array([len(numbers) for numbers in numbers_by_values.values()])
    neighbors = _agreements(list(numbers_by_values), tolerance)
    neighbor_counts = neighbors @ counts
    largest, largest_count = np.empty(0, dtype=np.int64), 0
    for row in np.argsort(-neighbor_counts, kind="stable"):
        if neighbor_counts[row] <= largest_count:
            break
        members, candidates = [row], neighbors[row].copy()
        for other in np.flatnonzero(candidates):
            if other != row and candidates[other]:
                members.append(other)
                candidates &= neighbors[other]
        if counts[members].sum() > largest_count:
            largest, largest_count = np.array(members), int(counts[members].sum())
    numbers = list(numbers_by_values.values())
    indices = {number for row in largest for number in numbers[row]}
    return [accepting[i] for i in sorted(indices)], [item for i, item in enumerate(accepting) if i not in indices]


def _agreements(opinions: Sequence[tuple[str, bytes]], tolerance: LogprobTolerance) -> NDArray[np.bool_]:
    """Return which log-probabilities agree: booleans of shape [N, N].

    Args:
        opinions: N arithmetics, each with the log-probabilities that were computed in it.
    """
    values = [np.frombuffer(data, dtype="<f4").astype(np.float64) for _, data in opinions]
    arithmetics = [arithmetic for arithmetic, _ in opinions]
    result = np.zeros((len(values), len(values)), dtype=np.bool_)
    rows_by_length: dict[int, list[int]] = {}
    for row, array in enumerate(values):
        if valid_logprobs(array):
            rows_by_length.setdefault(len(array), []).append(row)
    for length, rows in rows_by_length.items():
        table = np.stack([values[row] for row in rows])
        for row in rows:
            tolerances = {name: tolerance(arithmetics[row], name) for name in set(arithmetics)}
            limits = np.array([tolerances[arithmetics[other]] for other in rows])
            result[row, rows] = np.abs(table - values[row]).sum(axis=1) <= limits * length
    return result


def logprobs_agree(one: bytes, other: bytes, tolerance: float) -> bool:
    """Return whether two nodes' log-probabilities of a group's tokens agree; false if either cannot be right."""
    return bool(_agreements([("", one), ("", other)], lambda *_: tolerance)[0, 1])


def refuse_improbable_window(decisions: Sequence[Decision], thresholds: Thresholds) -> list[Decision]:
    """Return the decisions on a miner's window; the accepted ones are refused if honest work would not give all of
    them together.

    Where R1 deals the groups, each validator tests its own part of a window. Only all parts together show a cheat in a
    few tokens of each group.

    No single validator can cause this by misses that it invents. Of each group the smallest counts of the judgements
    that accept it are taken; and what is left must be improbable without the groups that one validator alone accepts,
    whichever it is.

    Args:
        decisions: on all groups of the window, those included that were carried out before.
        thresholds: within which those lie by which the misses were counted.
    """
    accepted = [decision for decision in decisions if not decision.reason and not decision.pending]
    sole_judges = {decision.validators for decision in accepted if len(decision.validators) == 1}
    evidence = [
        window_surprisal([_smallest_counts(item) for item in accepted if item.validators != left_out], thresholds)
        for left_out in sole_judges or [()]
    ]
    if min(evidence) <= surprisal_threshold(thresholds):
        return list(decisions)
    reason = Reason.WINDOW.value
    return [replace(decision, reason=decision.reason or reason, pending=False) for decision in decisions]


def _smallest_counts(decision: Decision) -> Counts:
    counts = [judgement.counts for judgement in decision.accepting]
    return Counts(**{field.name: min(getattr(item, field.name) for item in counts) for field in fields(Counts)})
