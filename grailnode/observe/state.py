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
    """One published policy version, of which 0 is genesis."""

    version: int
    optimizer_step: int
    first_window: int
    # size of its patch; None for genesis and for an anchor without a patch (after a failed upload)
    patch_bytes: int | None
    anchor_bytes: int | None  # size of its anchor's shards; None for a version without an anchor
    changed: int  # elements of the BF16 view that differ from the version before
    total: int  # all elements

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
    """One window as the validators judged it."""

    window: int
    version: int
    accepted: int
    rejected: int
    reward: float | None  # mean reward over the rollouts of accepted groups; None if there were none
    # of `version` on held-out problems, in [0, 1], as a validator measured it; None if nobody did
    pass_at_1: float | None
    pass_at_k: float | None = None  # the same
    strata: tuple[StratumRow, ...] = ()


@dataclass(frozen=True, config=STRICT)
class MinerRow:
    """One miner over the windows that were read."""

    key: Hex
    name: str  # the operator's name for it, else the name that it announced, else the first eight digits of its key
    kind: MinerKind  # only the demo knows it
    submitted: Count  # groups committed to
    accepted: Count  # groups that validators accepted
    rejected: dict[str, Count]
    score: Share  # share of the window rewards, in [0, 1]

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
    """One closed round of sites that train together."""

    number: Count
    step: Count  # rounds so far that changed the weights
    version: Count  # the policy version after the round
    counted: Count  # contributions that count
    sites: Count  # those that the round had
    local_steps: Count
    groups: Count
    payload_bytes: Count


@dataclass(frozen=True, config=STRICT)
class SiteRow:
    """One site over the rounds that were read."""

    key: Hex
    name: str  # see `MinerRow`
    rounds: Count  # in which its contribution counted
    refused: dict[str, Count]  # rounds in which nothing of it counted, by reason code
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
    """One validator of the run."""

    key: str
    name: str
    windows: int  # how many of the windows that were read it has revealed
    accepted: int
    rejected: int
    check_rate: float  # completion tokens in a second of checking
    recent: tuple[JudgedWindow, ...]  # its groups in the newest of the windows


@dataclass(frozen=True, config=STRICT)
class StageRow:
    """A window that is not decided yet."""

    window: int
    stage: str  # what happens now
    until: float | None  # the time at which the stage ends, in seconds since the Unix epoch, None for never
    revealed: int  # validators that have revealed their summary


@dataclass(frozen=True, config=STRICT)
class HeadRow:
    """The head, as the trainer signed it (docs/spec/chain.md). Times are in seconds since the Unix epoch."""

    version: int
    made_at: float  # when its newest version was made, by the beacon
    signed_at: float
    expires_at: float  # when it ceases to be valid
    epoch: int
    revision: int
    base: int
    oldest_patch: int
    anchors: tuple[int, ...]
    weights: str  # digest of the newest version's weights, in hex


@dataclass(frozen=True, config=STRICT)
class NodeRow:
    """One node of the demo: its name ('trainer', 'miner-1', ...), policy version, and newest event in words."""

    name: str
    version: int | None
    doing: str


@dataclass(frozen=True, config=STRICT)
class NetworkState:
    """A run at one moment."""

    run_id: str  # hex digest of the run manifest
    run_name: str  # its human name
    seconds: float  # since the view began
    window: int | None  # the current window; None before the first
    windows_planned: int | None  # how many a demo runs; None for endless
    window_seconds: float
    window_elapsed: float  # seconds into the current window
    full_bytes: int  # size of a full BF16 checkpoint
    versions: tuple[VersionRow, ...] = ()
    windows: tuple[WindowRow, ...] = ()
    miners: tuple[MinerRow, ...] = ()
    nodes: tuple[NodeRow, ...] = ()
    rounds: tuple[RoundRow, ...] = ()  # none where the trainer trains alone
    sites: tuple[SiteRow, ...] = ()  # likewise
    tokens_generated: int = 0  # completion tokens of judged groups
    tokens_verified: int = 0  # completion tokens of accepted groups
    # completion tokens that a validator checks in a second of checking; 0 before the first summary
    check_rate: float = 0.0
    # one line each (forks, false objects, validators that a canary deceived, storage that does not answer)
    alarms: tuple[str, ...] = ()
    # seconds since the trainer signed the head, which it renews; None before the first one
    head_age: float | None = None
    has_ended: bool = False  # whether the head has expired: the run has ended, or its trainer has stopped
    silent: tuple[str, ...] = ()  # trainer and validators who take part by the authority, and show no sign of it
    pass_at: int = 1
    bottleneck: str = ""  # what limits the trainer, where it runs on this machine; empty elsewhere
    unjudged: tuple[str, ...] = ()  # a line for each validator of this machine whose newest window was short of time
    troubles: tuple[str, ...] = ()  # a line for each process of this machine that waits, or is started again and again
    # the newest judged windows of each miner, by its key
    recent: Mapping[str, tuple[JudgedWindow, ...]] = field(default_factory=dict)
    validators: tuple[ValidatorRow, ...] = ()
    stages: tuple[StageRow, ...] = ()  # the windows that are not decided yet, the newest first
    head: HeadRow | None = None
    # the last time at which all of storage answered, in seconds since the Unix epoch; None for never
    read_at: float | None = None

    @property
    def generated_per_second(self) -> float:
        """Completion tokens of judged groups in a second since the view began; 0 at its beginning."""
        return self.tokens_generated / self.seconds if self.seconds > 0 else 0.0

    @property
    def verified_per_second(self) -> float:
        """Completion tokens of accepted groups in a second since the view began; 0 at its beginning."""
        return self.tokens_verified / self.seconds if self.seconds > 0 else 0.0
