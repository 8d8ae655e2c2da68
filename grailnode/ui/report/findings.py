"""What a report says in a few figures: the ones that its page and the terminal's summary both begin with."""

from dataclasses import dataclass
from statistics import fmean, median
from typing import Self

from grailnode.ui.figures import known, merged
from grailnode.ui.report.report_data import DemoReport, MinerGroups


@dataclass(frozen=True)
class Change:
    """A series from its first known value to its last."""

    first: float
    last: float

    @property
    def gain(self) -> float:
        """Last minus first, both to two decimals as they are shown: 0.44 to 0.78 is 0.34 to every reader."""
        return round(round(self.last, 2) - round(self.first, 2), 2)

    @classmethod
    def of(cls, values: list[float | None]) -> Self | None:
        """The change over a series; None where nothing was measured."""
        measured = known(values)
        return cls(measured[0], measured[-1]) if measured else None


@dataclass(frozen=True)
class Findings:
    """A run in a few figures.

    Attributes:
        pass_at_1, reward: over the run; None where nothing was measured.
        sparsity: mean over versions; patch_bytes: median over versions; None where there was no patch.
        accepted, rejected: groups in all; reasons: the rejected ones by reason code.
        false_rejections: rejected groups of honest miners; false_acceptances: accepted groups of cheating ones.
        equal_nodes: nodes that hold the reference weights at the end; nodes: all that reported a digest.
    """

    pass_at_1: Change | None
    reward: Change | None
    sparsity: float | None
    patch_bytes: int | None
    accepted: int
    rejected: int
    reasons: dict[str, int]
    false_rejections: int
    false_acceptances: int
    equal_nodes: int
    nodes: int

    @classmethod
    def of(cls, report: DemoReport) -> Self:
        """Work the figures out."""
        sparsity = known(report.sparsity)
        patches = known(report.patch_bytes)
        reference = reference_digest(report)
        return cls(
            pass_at_1=Change.of(report.pass_at_1),
            reward=Change.of(report.reward),
            sparsity=fmean(sparsity) if sparsity else None,
            patch_bytes=round(median(patches)) if patches else None,
            accepted=sum(miner.accepted for miner in report.groups),
            rejected=sum(miner.rejections for miner in report.groups),
            reasons=merged([miner.rejected for miner in report.groups]),
            false_rejections=sum(miner.rejections for miner in _of_kind(report, "honest")),
            false_acceptances=sum(miner.accepted for miner in _of_kind(report, "cheating")),
            equal_nodes=sum(digest == reference for digest in report.weights_digest.values()),
            nodes=len(report.weights_digest),
        )


def reference_digest(report: DemoReport) -> str | None:
    """The digest that every node should hold: the trainer's, or the first one named where no trainer reported."""
    digests = report.weights_digest
    return digests.get("trainer", next(iter(digests.values()), None))


def judgement_text(report: DemoReport, findings: Findings) -> str:
    """One sentence on whether verification told cheaters from honest miners; empty where nobody knows who cheats."""
    cheating = _of_kind(report, "cheating")
    if not cheating or not (findings.accepted + findings.rejected):
        return ""
    if not findings.false_rejections and not findings.false_acceptances:
        return "Every judged group of a cheating miner was rejected, and no group of an honest one."
    return (
        f"{findings.false_rejections} groups of honest miners were rejected, "
        f"and {findings.false_acceptances} groups of cheating ones were accepted."
    )


def _of_kind(report: DemoReport, kind: str) -> list[MinerGroups]:
    return [miner for miner in report.groups if miner.kind == kind]
