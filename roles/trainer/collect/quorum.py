"""Which groups enough validators accept with the same log-probabilities, and which miners' windows their evidence
together refuses. Pure functions of verdicts."""

from collections import Counter
from collections.abc import Callable, Container, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from protocol.judging.evidence import NO_EVIDENCE, Evidence, highest_evidence, weigh
from protocol.judging.verdict import Judgement, Reason, Verdict
from protocol.proof import ProofSpec
from roles.trainer.verified_batch import GroupOutcome, whole_logprobs

LOGPROBS_DISAGREE = "logprobs-disagree"
"""The reason against a group for whose tokens the validators that accept it give different log-probabilities."""

BELOW_DEPOSIT = "below-deposit"
"""The reason against a group of a miner that earns nothing by the ledgers of validators that accept it."""


@dataclass(frozen=True)
class LogprobRule:
    """When two nodes' log-probabilities of a group agree: within the proof's bounds, and never for a biased pair."""

    proof: ProofSpec
    biased_pairs: Set[frozenset[bytes]] = frozenset()


@dataclass(frozen=True)
class Opinion:
    """A validator's judgement on a group, and the verdict that contains it."""

    judgement: Judgement
    verdict: Verdict
    pays: bool = True  # whether the miner earns something by its ledger

    @property
    def validator(self) -> bytes:
        return self.verdict.validator

    @property
    def computed(self) -> tuple[str, bytes]:
        """How the validator computed the log-probabilities, and what they are."""
        return self.verdict.validator_arithmetic, self.judgement.logprobs


@dataclass(frozen=True)
class Decision:
    """What the validators' verdicts decide about one group."""

    # digest of the commitment that promises it, its index there, and SHA-256 of its frame
    group: tuple[bytes, int, bytes]
    accepting: tuple[Opinion, ...]  # the opinions that accept it and agree on its log-probabilities
    reason: str  # why it is not accepted; empty if it is accepted or pending
    pending: bool  # whether a verdict that may still come could change this
    dissenting: tuple[Opinion, ...] = ()  # the other opinions that accept it

    @property
    def validators(self) -> tuple[bytes, ...]:
        """The validators that accept it and agree."""
        return tuple(opinion.validator for opinion in self.accepting)

    def outcome(self, status: str) -> GroupOutcome:
        """Return the group's entry for the outcome log."""
        commitment, index, digest = self.group
        return GroupOutcome(commitment=commitment, index=index, digest=digest, status=status)


def decide(
    verdicts: Sequence[Verdict],
    quorum: int,
    outstanding: Set[bytes],
    rule: LogprobRule,
    paying: Container[bytes],
    judges_of: Callable[[int], Set[bytes]],
) -> list[Decision]:
    """Decide about every judged group of one miner's window.

    A group counts as the validators judge it to which it was dealt. What others say of it decides nothing: validators
    that lie together could otherwise accept every group, and not only those of which all judges lie.

    What earns nothing is not used: with any number of new keys, a miner could show the groups of those that it likes.

    There is at most one verdict from each validator. The `outstanding` ones may still give one; by the ledgers of those
    `paying` the miner earns something; and `judges_of` returns those to which a group (its index) was dealt.
    """
    opinions_by_group: dict[tuple[bytes, int, bytes], list[Opinion]] = {}
    for verdict in verdicts:
        for judgement in verdict.judgements:
            group = (verdict.commitment, judgement.index, judgement.digest)
            pays = verdict.validator in paying
            opinions_by_group.setdefault(group, []).append(Opinion(judgement, verdict, pays))
    decisions = []
    for group, all_opinions in sorted(opinions_by_group.items()):
        judges = judges_of(group[1])
        opinions = [opinion for opinion in all_opinions if opinion.validator in judges]
        awaited = len(outstanding & judges)
        accepting = [opinion for opinion in opinions if opinion.judgement.accepted and opinion.pays]
        agreeing, others = split_by_logprobs(accepting, rule)
        contested = len(split_by_logprobs(others, rule)[0]) >= quorum
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
                accepting=tuple(agreeing),
                reason="" if can_have_quorum else main_reason,
                pending=can_have_quorum and not has_quorum,
                dissenting=tuple(others),
            )
        )
    return decisions


def split_by_logprobs(accepting: Sequence[Opinion], rule: LogprobRule) -> tuple[list[Opinion], list[Opinion]]:
    """Return the largest set of opinions found whose log-probabilities agree with each other, and the others. An
    opinion whose values cannot be log-probabilities agrees with none.
    """
    suspects = frozenset[bytes]().union(*rule.biased_pairs)
    numbers_by_values: dict[tuple[bytes, str, bytes], list[int]] = {}  # equal values are compared once
    for number, opinion in enumerate(accepting):
        suspect = opinion.validator if opinion.validator in suspects else b""
        numbers_by_values.setdefault((suspect, *opinion.computed), []).append(number)
    counts = np.array([len(numbers) for numbers in numbers_by_values.values()])
    neighbors = _agreements(list(numbers_by_values), rule)
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


def _agreements(opinions: Sequence[tuple[bytes, str, bytes]], rule: LogprobRule) -> NDArray[np.bool_]:
    """Return which log-probabilities of N opinions (key, arithmetic, values) agree: booleans of shape [N, N]."""
    values = [whole_logprobs(data) for _, _, data in opinions]
    result = np.zeros((len(values), len(values)), dtype=np.bool_)
    rows_by_length: dict[int, list[int]] = {}
    for row, array in enumerate(values):
        if array is not None:
            rows_by_length.setdefault(len(array), []).append(row)
    for length, rows in rows_by_length.items():
        table = np.stack([array for row in rows if (array := values[row]) is not None])
        for place, row in enumerate(rows):
            tolerances = np.array(
                [rule.proof.logprob_bounds(opinions[row][1], opinions[other][1])[0] for other in rows]
            )
            result[row, rows] = np.abs(table - table[place]).sum(axis=1) <= tolerances * length
    places = {key: row for row, (key, _, _) in enumerate(opinions)}
    for pair in rule.biased_pairs:
        if pair <= places.keys():
            one, other = (places[key] for key in pair)
            result[one, other] = result[other, one] = False
    return result


def logprobs_agree(one: tuple[str, bytes], other: tuple[str, bytes], proof: ProofSpec) -> bool:
    """Return whether two nodes' log-probabilities of a group's tokens agree; false if either cannot be right."""
    return bool(_agreements([(b"", *one), (b"", *other)], LogprobRule(proof))[0, 1])


def refuse_improbable_window(decisions: Sequence[Decision], proof: ProofSpec) -> list[Decision]:
    """Return the decisions on a miner's window; the accepted ones are refused if honest work would not give all of
    them together.

    Where R1 deals the groups, each validator tests its own part of a window. Only all parts together show a cheat in a
    few tokens of each group.

    No single validator can cause this by misses that it invents: each group adds the smallest evidence of those that
    accept it, and what is left must be improbable without the groups that one validator alone accepts, whichever it is.
    """
    accepted = [decision for decision in decisions if not decision.reason and not decision.pending]
    added = [(decision.validators, _smallest_evidence(decision, proof)) for decision in accepted]
    sole_judges = {validators for validators, _ in added if len(validators) == 1}
    highest = min(
        highest_evidence(NO_EVIDENCE, [evidence for validators, evidence in added if validators != left_out])
        for left_out in sole_judges or [()]
    )
    if highest <= max(row.threshold for row in proof.table):
        return list(decisions)
    reason = Reason.WINDOW.value
    return [replace(decision, reason=decision.reason or reason, pending=False) for decision in decisions]


def _smallest_evidence(decision: Decision, proof: ProofSpec) -> Evidence:
    """Return the smallest evidence of each alternative by the opinions that accept a group, each by its own row."""
    rows = [proof.row(item.verdict.miner_arithmetic, item.verdict.validator_arithmetic) for item in decision.accepting]
    weights = [weigh(item.judgement.counts, row) for item, row in zip(decision.accepting, rows, strict=True)]
    return tuple(map(min, zip(*weights, strict=True)))  # the smaller of two e-values is one
