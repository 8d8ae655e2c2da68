"""The data of report.json, the record of a finished run, and the few figures that its page and summary begin with."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Self

from pydantic import BaseModel, ConfigDict

from grailnode.observe.state import STRICT, Count, Hex, NetworkState, Share
from grailnode.ui.formatting import percent_text
from grailnode.ui.series import Change, Tally, mean, without_gaps

_MUCH = 0.5  # share of its time from which on a trainer's wait has a reason beside it


class DemoReport(BaseModel):
    """A whole report.json: the public state of a run that has ended, and what only its operator knows."""

    model_config = ConfigDict(**STRICT, frozen=True)

    command: str  # the command line that repeats the run
    verify_command: str = "grailnode verify --run run.toml"  # that checks its chain again
    seed: int  # of the run
    environment: str  # the name of the run's task
    model_parameters: Count  # elements of the policy
    # hex digest of the weights that each node holds at the end, by node name; the trainer is one of the nodes
    weights_digest: dict[str, Hex]
    trainer_io_wait_fraction: Share  # of the training process' time, spent waiting for its own uploads and downloads
    trainer_data_wait_fraction: Share  # of the same, spent waiting for verified groups to exist
    state: NetworkState


@dataclass(frozen=True)
class Findings:
    """A run in a few figures."""

    pass_at_1: Change | None  # the change over the run; None if nothing was measured
    reward: Change | None  # the same
    sparsity: float | None  # mean over versions; None if there was no patch
    patch_bytes: int | None  # median over versions; None if there was no patch
    groups: Tally  # judged groups of all miners
    false_rejections: int  # rejected groups of honest miners
    false_acceptances: int  # accepted groups of cheating miners
    equal_nodes: int  # nodes that hold the reference weights at the end
    nodes: int  # all that reported a digest

    @classmethod
    def of(cls, state: NetworkState, digests: Mapping[str, str] | None = None) -> Self:
        """Compute the figures of a run, with the digests of the weights that nodes report."""
        digests = digests or {}
        patches = without_gaps([row.patch_bytes for row in state.versions])
        reference = reference_digest(digests)
        return cls(
            pass_at_1=Change.of([row.pass_at_1 for row in state.windows]),
            reward=Change.of([row.reward for row in state.windows]),
            sparsity=mean([row.sparsity for row in state.versions]),
            patch_bytes=round(median(patches)) if patches else None,
            groups=Tally.of(state.miners),
            false_rejections=sum(miner.rejections for miner in state.miners if miner.kind == "honest"),
            false_acceptances=sum(miner.accepted for miner in state.miners if miner.kind == "cheating"),
            equal_nodes=sum(digest == reference for digest in digests.values()),
            nodes=len(digests),
        )


def reference_digest(digests: Mapping[str, str]) -> str | None:
    """Return the digest that every node should hold: the trainer's, or the first one if the trainer reported none."""
    return digests.get("trainer", next(iter(digests.values()), None))


def judgement_text(state: NetworkState, findings: Findings) -> str:
    """Say whether cheaters were told from honest miners, or nothing was judged; empty if nobody knows who cheats."""
    is_known = any(miner.kind == "cheating" for miner in state.miners)
    if not state.windows or (is_known and not findings.groups.judged):
        return "No group was judged in time: let the machine do nothing else meanwhile, or take more --windows."
    if not is_known:
        return ""
    if not findings.false_rejections and not findings.false_acceptances:
        return "Every judged group of a cheating miner was rejected, and no group of an honest one."
    return (
        f"{findings.false_rejections} groups of honest miners were rejected, "
        f"and {findings.false_acceptances} groups of cheating ones were accepted."
    )


def trainer_wait_text(report: DemoReport) -> str:
    """Say which shares of its time the trainer waited: '0.3% for I/O, 31% for data', and why if that is much."""
    io, data = percent_text(report.trainer_io_wait_fraction), percent_text(report.trainer_data_wait_fraction)
    shared = "; trainer and miners share this machine's cores" if report.trainer_data_wait_fraction >= _MUCH else ""
    return f"{io} for I/O, {data} for data{shared}"
