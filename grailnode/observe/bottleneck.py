"""What limits the nodes of this machine, by their own logs: the trainer's time, and what validators did not judge."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from grailnode.observe.node_logs import tail_events
from grailnode.observe.state import NetworkState

_MUCH: Final = 0.5  # share of the time from which on a wait is the bottleneck
_MOST_JUDGED: Final = 0.8  # share of the groups to judge below which the validators do not keep up
_RECENT_VERSIONS: Final = 8
_REPUTATIONS: Final = {
    "earning": "miners that earn",
    "known": "known miners",
    "stranger": "strangers",
    "rejected": "rejected miners",
}


@dataclass(frozen=True)
class TrainerTime:
    """Shares of the training process's time since its start: waiting for groups, and handing versions to the writer."""

    data: float
    hand_over: float


def read_trainer_time(logs: Path) -> TrainerTime | None:
    """Return the newest shares in the log of a trainer of this machine; None if there is no trainer, or no step yet."""
    paths = sorted(logs.glob("*-training.jsonl"), key=lambda path: path.stat().st_mtime)
    if not paths:
        return None
    for event in tail_events(paths[-1]):
        data, hand_over = event.get("data_wait_fraction"), event.get("io_wait_fraction")
        if event.get("event") == "step" and isinstance(data, float | int) and isinstance(hand_over, float | int):
            return TrainerTime(float(data), float(hand_over))
    return None


def bottleneck(time: TrainerTime, state: NetworkState, steps_per_version: int, audit_share: float) -> str:
    """Return a line that says what limits a trainer, and what to add.

    Args:
        state: of the run, for the groups that its miners and validators deliver.
        audit_share: the smallest share of a miner's groups that the run has validators judge, in (0, 1].
    """
    if time.data >= _MUCH:
        # No rule asks anybody to judge more of a miner that has no reputation left.
        miners = [miner for miner in state.miners if miner.score > 0 or not miner.rejections]
        submitted, judged = sum(miner.submitted for miner in miners), sum(miner.judged for miner in miners)
        if submitted and judged < _MOST_JUDGED * audit_share * submitted:
            what = f"validators judge {judged:,} of {submitted:,} groups: add validators, or faster ones"
        else:
            what = "add miners, or let them deliver more groups"
        return f"waits {time.data:.0%} of its time for verified groups; {what}"
    steps = [row.optimizer_step for row in state.versions[-_RECENT_VERSIONS:]]
    if len(steps) > 1:
        interval = (steps[-1] - steps[0]) / (len(steps) - 1)
        if time.hand_over >= _MUCH or interval > 1.5 * steps_per_version:
            return (
                f"publishes a version every {interval:.1f} steps instead of {steps_per_version}: storage is slower "
                "than steps; raise steps_per_version, or write to faster disks and links"
            )
    compute = max(0.0, 1.0 - time.data - time.hand_over)
    return f"computes {compute:.0%} of its time; a faster device or fewer groups_per_step give more steps"


def unjudged_cases(logs: Path) -> tuple[str, ...]:
    """Return a line for each validator of this machine that left cases of its newest window unjudged."""
    lines = []
    for path in sorted(logs.glob("*.jsonl")):
        event = next((item for item in tail_events(path) if item.get("event") == "judged"), None)
        if event is None:
            continue
        unjudged = {name: event.get(f"left_{reputation}", 0) for reputation, name in _REPUTATIONS.items()}
        parts = [f"{count:,} of {name}" for name, count in unjudged.items() if isinstance(count, int) and count > 0]
        if parts:
            lines.append(
                f"{path.stem} judged {event.get('cases')} miners' groups of window {event.get('window')} and left "
                f"{', '.join(parts)}: add validators, or faster ones"
            )
    return tuple(lines)
