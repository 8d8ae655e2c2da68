"""The few figures of a finished run that its page and the terminal's summary both begin with."""

from dataclasses import dataclass
from statistics import median
from typing import Self

from grailnode.ui.formatting import percent_text
from grailnode.ui.report_data import DemoReport
from grailnode.ui.series import Change, mean, without_gaps
from grailnode.ui.tallies import Tally


@dataclass(frozen=True)
class Findings:
    """A run in a few figures.

    Attributes:
        pass_at_1, reward: the change over the run; None if nothing was measured.
        sparsity: mean over versions; patch_bytes: median over versions; None if there was no patch.
        groups: judged groups of all miners.
        false_rejections: rejected groups of honest miners; false_acceptances: accepted groups of cheating ones.
        equal_nodes: nodes that hold the reference weights at the end; nodes: all that reported a digest.
    """

    pass_at_1: Change | None
    reward: Change | None
    sparsity: float | None
    patch_bytes: int | None
    groups: Tally
    false_rejections: int
    false_acceptances: int
    equal_nodes: int
    nodes: int

    @classmethod
    def of(cls, report: DemoReport) -> Self:
        """Compute the figures of a report."""
        patches = without_gaps(report.patch_bytes)
        reference = reference_digest(report)
        return cls(
            pass_at_1=Change.of(report.pass_at_1),
            reward=Change.of(report.reward),
            sparsity=mean(report.sparsity),
            patch_bytes=round(median(patches)) if patches else None,
            groups=Tally.of(report.groups),
            false_rejections=sum(miner.rejections for miner in report.groups if miner.kind == "honest"),
            false_acceptances=sum(miner.accepted for miner in report.groups if miner.kind == "cheating"),
            equal_nodes=sum(digest == reference for digest in report.weights_digest.values()),
            nodes=len(report.weights_digest),
        )


def reference_digest(report: DemoReport) -> str | None:
    """Return the digest that every node should hold: the trainer's, or the first in the report if the trainer reported
    none.
    """
    digests = report.weights_digest
    return digests.get("trainer", next(iter(digests.values()), None))


def judgement_text(report: DemoReport, findings: Findings) -> str:
    """Say in a sentence whether verification told cheaters from honest miners; empty if nobody knows who cheats."""
    if not any(miner.kind == "cheating" for miner in report.groups) or not findings.groups.judged:
        return ""
    if not findings.false_rejections and not findings.false_acceptances:
        return "Every judged group of a cheating miner was rejected, and no group of an honest one."
    return (
        f"{findings.false_rejections} groups of honest miners were rejected, "
        f"and {findings.false_acceptances} groups of cheating ones were accepted."
    )


def trainer_wait_text(report: DemoReport) -> str:
    """Say which shares of its time the trainer waited: '0.3% for I/O, 31% for data'."""
    io, data = percent_text(report.trainer_io_wait_fraction), percent_text(report.trainer_data_wait_fraction)
    return f"{io} for I/O, {data} for data"
