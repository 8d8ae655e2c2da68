"""Which groups enough validators accept. Pure functions of verdicts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.judging.verdict import Judgement, Verdict
from roles.trainer.verified_batch import GroupOutcome


@dataclass(frozen=True)
class Decision:
    """What the validators' verdicts decide about one group.

    Attributes:
        commitment: digest of the commitment that promises it; index: its place there; digest: SHA-256 of its frame.
        accepting: the judgements that accept it.
        reason: why it is not accepted; empty if it is accepted or pending.
        pending: whether a verdict that may still come could change this.
    """

    commitment: bytes
    index: int
    digest: bytes
    accepting: tuple[Judgement, ...]
    reason: str
    pending: bool

    @property
    def group(self) -> tuple[bytes, int, bytes]:
        """The group that it concerns: commitment, index and digest."""
        return self.commitment, self.index, self.digest

    def outcome(self, status: str) -> GroupOutcome:
        """Return the group's entry for the outcome log."""
        return GroupOutcome(commitment=self.commitment, index=self.index, digest=self.digest, status=status)


def decide(verdicts: Sequence[Verdict], quorum: int, outstanding: int) -> list[Decision]:
    """Decide about every judged group of one miner's window.

    Args:
        verdicts: at most one from each validator.
        quorum: how many validators must accept a group.
        outstanding: how many validators may still give a verdict.
    """
    judgements_by_group: dict[tuple[bytes, int, bytes], list[Judgement]] = {}
    for verdict in verdicts:
        for judgement in verdict.judgements:
            group = (verdict.commitment, judgement.index, judgement.digest)
            judgements_by_group.setdefault(group, []).append(judgement)
    decisions = []
    for (commitment, index, digest), judgements in sorted(judgements_by_group.items()):
        accepting = tuple(judgement for judgement in judgements if judgement.accepted)
        reasons = Counter(judgement.reason for judgement in judgements if not judgement.accepted)
        has_quorum = len(accepting) >= quorum
        can_have_quorum = len(accepting) + outstanding >= quorum
        main_reason = reasons.most_common(1)[0][0] if reasons else "no-quorum"
        decisions.append(
            Decision(
                commitment=commitment,
                index=index,
                digest=digest,
                accepting=accepting,
                reason="" if can_have_quorum else main_reason,
                pending=can_have_quorum and not has_quorum,
            )
        )
    return decisions
