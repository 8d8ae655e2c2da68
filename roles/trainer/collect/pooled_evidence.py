"""The evidence of several validators together. Where R1 deals the groups, each validator tests its own part of a
miner's window, and a cheat in few tokens of each group is seen in all parts together only. Pure functions of decisions.
"""

from collections.abc import Sequence
from dataclasses import fields, replace

from protocol.judging.evidence import Counts, surprisal_threshold, window_surprisal
from protocol.judging.verdict import Reason
from protocol.proof import Thresholds
from roles.trainer.collect.quorum import Decision


def refuse_improbable_window(decisions: Sequence[Decision], thresholds: Thresholds) -> list[Decision]:
    """Return the decisions on a miner's window; the accepted ones are refused if honest work would not give all of
    them together.

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
