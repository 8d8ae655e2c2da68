"""The state of a run as `status`, the demo's live view and its report show it.

It is read from public objects alone (grailnode/observe/observer.py): every stranger can check what these views show.
It stands in report.json as it is, so it is checked when one is read.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
MinerKind = Literal["honest", "cheating", "unknown"]
Hex = Annotated[str, Field(pattern=r"^[0-9a-f]*$")]
STORAGE_ALARM = "storage cannot be read now"
"""The beginning of the alarm of storage that does not answer."""

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
"""A misspelt key must not pass silently, and JSON has no NaN."""


@dataclass(frozen=True, config=STRICT)
class VersionRow:
    """One published policy version, of which 0 is genesis.

    Attributes:
        patch_bytes: size of its patch; None for genesis and for an anchor without a patch (after a failed upload).
        anchor_bytes: size of its anchor's shards; None for a version without an anchor.
        changed: elements of the BF16 view that differ from the version before; total: all elements.
    """

    version: int
    optimizer_step: int
    first_window: int
    patch_bytes: int | None
    anchor_bytes: int | None
    changed: int
    total: int

    @property
    def sparsity(self) -> float | None:
        """Share of elements that did not change, in [0, 1]; None for a version without a patch."""
        if self.patch_bytes is None:
            return None
        return 1.0 - self.changed / self.total if self.total else 1.0


@dataclass(frozen=True, config=STRICT)
class StratumRow:
    """The held-out problems of one kind: its name (empty for none), their number, and pass@1 and pass@k on them."""

    name: str
    problems: int
    pass_at_1: float
    pass_at_k: float | None = None


@dataclass(frozen=True, config=STRICT)
class WindowRow:
    """One window as the validators judged it.

    Attributes:
        reward: mean reward over the rollouts of accepted groups; None if there were none.
        pass_at_1, pass_at_k: of `version` on held-out problems, in [0, 1], as a validator measured it; None if nobody
            did.
    """

    window: int
    version: int
    accepted: int
    rejected: int
    reward: float | None
    pass_at_1: float | None
    pass_at_k: float | None = None
    strata: tuple[StratumRow, ...] = ()


@dataclass(frozen=True, config=STRICT)
class MinerRow:
    """One miner over the windows that were read.

    Attributes:
        name: the operator's name for it, else the name that it announced, else the first eight digits of its key.
        kind: only the demo knows it.
        submitted: groups committed to; accepted: groups that validators accepted.
        score: share of the window rewards, in [0, 1].
    """

    key: Hex
    name: str
    kind: MinerKind
    submitted: Count
    accepted: Count
    rejected: dict[str, Count]
    score: Share

    @property
    def rejections(self) -> int:
        return sum(self.rejected.values())

    @property
    def judged(self) -> int:
        return self.accepted + self.rejections

    @property
    def unjudged(self) -> int:
        """Groups that nobody judged; more may be judged than this view read commitments for."""
        return max(0, self.submitted - self.judged)


@dataclass(frozen=True, config=STRICT)
class RoundRow:
    """One closed round of sites that train together.

    Attributes:
        step: rounds so far that changed the weights; version: the policy version after the round.
        counted: contributions that count; sites: those that the round had.
    """

    number: Count
    step: Count
    version: Count
    counted: Count
    sites: Count
    local_steps: Count
    groups: Count
    payload_bytes: Count


@dataclass(frozen=True, config=STRICT)
class SiteRow:
    """One site over the rounds that were read.

    Attributes:
        name: the operator's name for it, else the name that it announced, else the first eight digits of its key.
        rounds: in which its contribution counted.
        refused: rounds in which nothing of it counted, by reason code.
    """

    key: Hex
    name: str
    rounds: Count
    refused: dict[str, Count]
    steps: Count
    groups: Count
    payload_bytes: Count


@dataclass(frozen=True, config=STRICT)
class JudgedWindow:
    """The groups of one miner in a window, or those that one validator judged."""

    window: int
    accepted: int
    rejected: int


@dataclass(frozen=True, config=STRICT)
class ValidatorRow:
    """One validator of the run.

    Attributes:
        windows: how many of the windows that were read it has revealed; recent: its groups in the newest of them.
        check_rate: completion tokens in a second of checking.
    """

    key: str
    name: str
    windows: int
    accepted: int
    rejected: int
    check_rate: float
    recent: tuple[JudgedWindow, ...]


@dataclass(frozen=True, config=STRICT)
class StageRow:
    """A window that is not decided yet.

    Attributes:
        stage: what happens now; until: the time at which it ends, in seconds since the Unix epoch, None for never.
        revealed: validators that have revealed their summary.
    """

    window: int
    stage: str
    until: float | None
    revealed: int


@dataclass(frozen=True, config=STRICT)
class HeadRow:
    """The head, as the trainer signed it (docs/spec/chain.md).

    Attributes:
        made_at: when its newest version was made, by the beacon; signed_at, expires_at: when the head was signed, and
            when it ceases to be valid; all in seconds since the Unix epoch.
        weights: digest of the newest version's weights, in hex.
    """

    version: int
    made_at: float
    signed_at: float
    expires_at: float
    epoch: int
    revision: int
    base: int
    oldest_patch: int
    anchors: tuple[int, ...]
    weights: str


@dataclass(frozen=True, config=STRICT)
class NodeRow:
    """One node of the demo: its name ('trainer', 'miner-1', ...), policy version, and newest event in words."""

    name: str
    version: int | None
    doing: str


@dataclass(frozen=True, config=STRICT)
class NetworkState:
    """A run at one moment.

    Attributes:
        run_id: hex digest of the run manifest; run_name: its human name.
        seconds: since the view began.
        window: the current window (None before the first); windows_planned: how many a demo runs (None: endless).
        window_seconds: length of a window; window_elapsed: seconds into the current one.
        full_bytes: size of a full BF16 checkpoint.
        rounds, sites: none where the trainer trains alone.
        tokens_generated, tokens_verified: completion tokens of judged groups, and of accepted ones.
        check_rate: completion tokens that a validator checks in a second of checking; 0 before the first summary.
        bottleneck: what limits the trainer, where it runs on this machine; empty elsewhere.
        unjudged: a line for each validator of this machine whose newest window was short of time.
        troubles: a line for each process of this machine that waits, or is started again and again.
        head_age: seconds since the trainer signed the head, which it renews; None before the first one.
        has_ended: whether the head has expired: the run has ended, or its trainer has stopped.
        silent: trainer and validators who take part by the authority, and show no sign of it.
        alarms: one line each (forks, false objects, validators that a canary deceived, storage that does not answer).
        recent: the newest judged windows of each miner, by its key.
        stages: the windows that are not decided yet, the newest first.
        read_at: the last time at which all of storage answered, in seconds since the Unix epoch; None for never.
    """

    run_id: str
    run_name: str
    seconds: float
    window: int | None
    windows_planned: int | None
    window_seconds: float
    window_elapsed: float
    full_bytes: int
    versions: tuple[VersionRow, ...] = ()
    windows: tuple[WindowRow, ...] = ()
    miners: tuple[MinerRow, ...] = ()
    nodes: tuple[NodeRow, ...] = ()
    rounds: tuple[RoundRow, ...] = ()
    sites: tuple[SiteRow, ...] = ()
    tokens_generated: int = 0
    tokens_verified: int = 0
    check_rate: float = 0.0
    alarms: tuple[str, ...] = ()
    head_age: float | None = None
    has_ended: bool = False
    silent: tuple[str, ...] = ()
    pass_at: int = 1
    bottleneck: str = ""
    unjudged: tuple[str, ...] = ()
    troubles: tuple[str, ...] = ()
    recent: Mapping[str, tuple[JudgedWindow, ...]] = field(default_factory=dict)
    validators: tuple[ValidatorRow, ...] = ()
    stages: tuple[StageRow, ...] = ()
    head: HeadRow | None = None
    read_at: float | None = None

    @property
    def generated_per_second(self) -> float:
        """Completion tokens of judged groups in a second since the view began; 0 at its beginning."""
        return self.tokens_generated / self.seconds if self.seconds > 0 else 0.0

    @property
    def verified_per_second(self) -> float:
        """Completion tokens of accepted groups in a second since the view began; 0 at its beginning."""
        return self.tokens_verified / self.seconds if self.seconds > 0 else 0.0
