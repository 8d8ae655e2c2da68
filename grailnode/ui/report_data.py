"""The data of report.json, the record of a finished run; series over windows or versions, in which None stands for a
missing measurement; and the few figures of a run that its page, summary and dashboard begin with.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Self

from pydantic import BaseModel, ConfigDict

from grailnode.observe.state import STRICT, Count, Hex, MinerRow, NetworkState, Share
from grailnode.ui.formatting import clean, percent_text

_MUCH = 0.5  # share of its time from which on a trainer's wait has a reason beside it


def without_gaps(values: Sequence[float | None]) -> list[float]:
    """Return the values that were measured, in order."""
    return [value for value in values if value is not None]


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that were measured; None if there are none."""
    measurements = without_gaps(values)
    return fmean(measurements) if measurements else None


def last(values: Sequence[float | None]) -> float | None:
    """Return the newest value that was measured; None if there are none."""
    return next((value for value in reversed(values) if value is not None), None)


@dataclass(frozen=True)
class Change:
    """The first and the last measurement of a series."""

    first: float
    last: float

    @property
    def gain(self) -> float:
        """Last minus first, both rounded to two decimals as they are printed: 0.44 to 0.78 is 0.34 to every reader."""
        return round(round(self.last, 2) - round(self.first, 2), 2)

    @property
    def ends_text(self) -> str:
        """'0.43 → 0.79'."""
        return f"{self.first:.2f} → {self.last:.2f}"

    @property
    def text(self) -> str:
        """'0.43 → 0.79  +0.36'."""
        return f"{self.ends_text}  {self.gain:+.2f}"

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Self | None:
        """Return the change over a series; None if nothing was measured."""
        measurements = without_gaps(values)
        return cls(measurements[0], measurements[-1]) if measurements else None


@dataclass(frozen=True)
class Tally:
    """Groups of one or more miners: accepted ones, and rejected ones by reason code."""

    accepted: int
    reasons: Mapping[str, int]

    @property
    def rejected(self) -> int:
        return sum(self.reasons.values())

    @property
    def judged(self) -> int:
        return self.accepted + self.rejected

    @classmethod
    def of(cls, rows: Iterable[MinerRow]) -> Self:
        accepted = 0
        reasons: Counter[str] = Counter()
        for row in rows:
            accepted += row.accepted
            reasons.update(row.rejected)
        return cls(accepted, dict(reasons))


def by_count(reasons: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return reasons with their counts, the most frequent first; ties by name, so that output repeats."""
    return sorted(((reason, n) for reason, n in reasons.items() if n > 0), key=lambda item: (-item[1], item[0]))


def reasons_text(reasons: Mapping[str, int], most: int = 8) -> str:
    """Write 'reason n' for each reason, the most frequent first; '+2' stands for two more than `most`."""
    ranked = by_count(reasons)
    parts = [f"{clean(reason)} {count}" for reason, count in ranked[:most]]
    return ", ".join([*parts, f"+{len(ranked) - most}"] if len(ranked) > most else parts)


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
