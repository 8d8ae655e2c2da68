"""The data of report.json, the record of a finished run, and the few figures that its page and the summary begin with.

The plots are drawn over two lists of indexes: `pass_at_1` and `reward` have one entry for each of `window_index`,
`sparsity` and `patch_bytes` one for each of `version_index`. An entry is null where nothing was measured.
"""

from dataclasses import dataclass
from statistics import median
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from grailnode.observe.state import STRICT, Count, Hex, MinerRow, NetworkState, RoundRow, Share, SiteRow
from grailnode.ui.formatting import percent_text
from grailnode.ui.series import Change, Tally, mean, without_gaps

_MUCH = 0.5  # share of its time from which on a trainer's wait has a reason beside it
_FROZEN = ConfigDict(**STRICT, frozen=True)


class TokensPerSecond(BaseModel):
    """Completion tokens per second over the whole run, all miners or all validators together."""

    model_config = _FROZEN

    generated: Annotated[float, Field(ge=0)]
    verified: Annotated[float, Field(ge=0)]


class RunFacts(BaseModel):
    """The part of a report that only the operator of the run knows; the rest follows from the public state.

    Attributes:
        command: the command line that repeats the run; verify_command: that checks its chain again.
        seed: of the run; environment: the name of its task; model_parameters: elements of the policy.
        weights_digest: hex digest of the weights that each node holds at the end, by node name; the trainer is one of
            the nodes.
        trainer_io_wait_fraction: share of the training process' time spent waiting for its own uploads and downloads.
        trainer_data_wait_fraction: share of it spent waiting for verified groups to exist.
    """

    model_config = _FROZEN

    command: str
    verify_command: str = "grailnode verify --run run.toml"
    seed: int
    environment: str
    model_parameters: Count
    weights_digest: dict[str, Hex]
    trainer_io_wait_fraction: Share
    trainer_data_wait_fraction: Share


class RunFigures(BaseModel):
    """What follows from the public state of a run.

    Attributes:
        run_id: hex digest of the run manifest; run_name: its human name.
        windows, versions: how many windows were judged, and policy versions published.
        window_index, version_index: their numbers.
        pass_at: k of pass@k.
        pass_at_1, pass_at_k, reward: for each window; sparsity, patch_bytes: for each version (null for genesis and
            re-anchorings).
        anchor_bytes: size of the newest anchor, 0 for none; full_bytes: of a full BF16 checkpoint.
        sites, rounds: of the sites that train together; both are missing where the trainer trains alone.
        weights_digest: as in `RunFacts`; empty where no operator reports.
    """

    model_config = _FROZEN

    run_id: Hex
    run_name: str
    seconds: Annotated[float, Field(ge=0)]
    windows: Count
    versions: Count
    window_index: list[Count]
    version_index: list[Count]
    pass_at_1: list[Share | None]
    pass_at: Count
    pass_at_k: list[Share | None]
    reward: list[float | None]
    sparsity: list[Share | None]
    patch_bytes: list[Count | None]
    anchor_bytes: Count
    full_bytes: Count
    groups: tuple[MinerRow, ...]
    tokens_per_second: TokensPerSecond
    sites: tuple[SiteRow, ...] = ()
    rounds: tuple[RoundRow, ...] = ()
    weights_digest: dict[str, Hex] = {}

    @model_validator(mode="after")
    def _lists_match(self) -> Self:
        for index, names in (
            ("window_index", ("pass_at_1", "pass_at_k", "reward")),
            ("version_index", ("sparsity", "patch_bytes")),
        ):
            for name in names:
                sizes = len(getattr(self, name)), len(getattr(self, index))
                if sizes[0] != sizes[1]:
                    raise ValueError(f"{name} has {sizes[0]} entries, {index} has {sizes[1]}: one is needed for each")
        return self

    @classmethod
    def of(cls, state: NetworkState, facts: RunFacts | None = None) -> Self:
        """Return the figures of a run in `state`, with what its operator knows where the class has it."""
        anchors = [row.anchor_bytes for row in state.versions if row.anchor_bytes is not None]
        return cls(
            **(facts.model_dump() if facts else {}),
            run_id=state.run_id,
            run_name=state.run_name,
            seconds=max(state.seconds, 0.0),
            windows=len(state.windows),
            versions=len(state.versions),
            window_index=[row.window for row in state.windows],
            version_index=[row.version for row in state.versions],
            pass_at_1=[row.pass_at_1 for row in state.windows],
            pass_at=state.pass_at,
            pass_at_k=[row.pass_at_k for row in state.windows],
            reward=[row.reward for row in state.windows],
            sparsity=[row.sparsity for row in state.versions],
            patch_bytes=[row.patch_bytes for row in state.versions],
            anchor_bytes=anchors[-1] if anchors else 0,
            full_bytes=state.full_bytes,
            groups=state.miners,
            sites=state.sites,
            rounds=state.rounds,
            tokens_per_second=TokensPerSecond(generated=state.generated_per_second, verified=state.verified_per_second),
        )


class DemoReport(RunFacts, RunFigures):
    """A whole report.json: facts and figures of a run that has ended."""


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
    def of(cls, report: RunFigures) -> Self:
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


def reference_digest(report: RunFigures) -> str | None:
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
    """Say which shares of its time the trainer waited: '0.3% for I/O, 31% for data', and why if that is much."""
    io, data = percent_text(report.trainer_io_wait_fraction), percent_text(report.trainer_data_wait_fraction)
    shared = "; trainer and miners share this machine's cores" if report.trainer_data_wait_fraction >= _MUCH else ""
    return f"{io} for I/O, {data} for data{shared}"
