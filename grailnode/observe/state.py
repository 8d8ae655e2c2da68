"""What a bystander can know of a run: the state that `status`, the demo's view and its report are made from.

Read from public objects alone (grailnode/observe/observer.py), so the view shows what every stranger could check.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class VersionRow:
    """One published policy version.

    Attributes:
        version: 0 is genesis.
        optimizer_step: optimizer steps taken when it was made.
        first_window: the first window that it serves.
        patch_bytes: size of its patch; None for a version that has an anchor only.
        anchor_bytes: size of its anchor's shards; None where it has none.
        changed: elements of the BF16 view that differ from the version before; total: elements in all.
    """

    version: int
    optimizer_step: int
    first_window: int
    patch_bytes: int | None
    anchor_bytes: int | None
    changed: int
    total: int

    @property
    def sparsity(self) -> float:
        """Share of elements that did not change, in [0, 1]."""
        return 1.0 - self.changed / self.total if self.total else 1.0


@dataclass(frozen=True)
class WindowRow:
    """One window as the validators saw it.

    Attributes:
        window: its number.
        version: the policy version that served it.
        accepted, rejected: groups.
        reward: mean reward over the rollouts of accepted groups; None where there was none.
        pass_at_1: held-out greedy pass@1 of `version` in [0, 1], as a validator measured it; None where none did.
    """

    window: int
    version: int
    accepted: int
    rejected: int
    reward: float | None
    pass_at_1: float | None


@dataclass(frozen=True)
class MinerRow:
    """One miner over the windows that are kept.

    Attributes:
        key: its public key, lower-case hex.
        name: what the operator of this view calls it; the key's first eight digits for strangers.
        kind: 'honest', 'cheating', or 'unknown' for strangers (only the demo knows).
        submitted: groups committed to; accepted: groups that validators accepted.
        rejected: groups rejected, by reason code.
        score: share of the window rewards, in [0, 1].
    """

    key: str
    name: str
    kind: str
    submitted: int
    accepted: int
    rejected: dict[str, int]
    score: float


@dataclass(frozen=True)
class NodeRow:
    """One process that the demo runs: its name ('trainer', 'miner-1', ...), version held, and what it says it does now."""

    name: str
    version: int | None
    doing: str


@dataclass(frozen=True)
class NetworkState:
    """A run at one moment.

    Attributes:
        run_id: hex digest of the run manifest; run_name: its human name.
        seconds: since the view began.
        window: the current window (None before the first); windows_planned: where a demo will stop (None: endless).
        window_seconds: length of a window; window_elapsed: seconds into the current one.
        versions, windows, miners, nodes: rows in order.
        full_bytes: size of a full BF16 checkpoint.
        tokens_generated, tokens_verified: in all, completion tokens.
        alarms: one clear line each (forks, lies, stalls).
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
    tokens_generated: int = 0
    tokens_verified: int = 0
    alarms: tuple[str, ...] = field(default=())
