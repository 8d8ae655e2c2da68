"""Which groups enough validators accept. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.judging.verdict import Judgement, Verdict
from roles.trainer.verified_batch import Outcome


@dataclass(frozen=True)
class Decision:
    """What the validators say of one group of a commitment.

    Attributes:
        commitment: digest of the commitment that holds it.
        accepting: the judgements that accept it.
        reason: why it is not accepted; empty while it is, or while too few have spoken.
        open: whether a verdict that is still out could change this.
    """

    commitment: bytes
    index: int
    digest: bytes
    accepting: tuple[Judgement, ...]
    reason: str
    open: bool

    @property
    def group(self) -> tuple[bytes, int, bytes]:
        """What it is about: commitment, index and digest."""
        return self.commitment, self.index, self.digest

    def became(self, outcome: str) -> Outcome:
        """The entry of an account."""
        return Outcome(commitment=self.commitment, index=self.index, digest=self.digest, outcome=outcome)


def decide(verdicts: Sequence[Verdict], quorum: int, outstanding: int) -> list[Decision]:
    """Decide every judged group of one miner's window.

    Args:
        verdicts: at most one from each validator.
        quorum: how many validators must accept.
        outstanding: validators that have not spoken and may still.
    """
    judged: dict[tuple[bytes, int, bytes], list[Judgement]] = {}
    for verdict in verdicts:
        for judgement in verdict.judgements:
            judged.setdefault((verdict.commitment, judgement.index, judgement.digest), []).append(judgement)
    decisions = []
    for (commitment, index, digest), judgements in sorted(judged.items()):
        accepting = tuple(judgement for judgement in judgements if judgement.accepted)
        reasons = Counter(judgement.reason for judgement in judgements if not judgement.accepted)
        reached = len(accepting) >= quorum
        possible = len(accepting) + outstanding >= quorum
        common = reasons.most_common(1)[0][0] if reasons else "no-quorum"
        decisions.append(
            Decision(
                commitment=commitment,
                index=index,
                digest=digest,
                accepting=accepting,
                reason="" if reached or possible else common,
                open=not reached and possible,
            )
        )
    return decisions
