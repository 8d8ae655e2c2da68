"""What limits the nodes of this machine, by their own logs: the trainer's time, and what validators did not judge."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from grailnode.config import Config
from grailnode.observe.node_logs import tail_events, troubles
from grailnode.observe.state import NetworkState
from roles.node.identity import Node

_MUCH: Final = 0.5  # share of the time from which on a wait is the bottleneck
_MOST_JUDGED: Final = 0.8  # share of the groups to judge below which the validators do not keep up
_RECENT_VERSIONS: Final = 8
_REPUTATIONS: Final = {
    "earning": "miners that earn",
    "known": "known miners",
    "stranger": "strangers",
    "rejected": "rejected miners",
}


def with_local_knowledge(config: Config, node: Node, state: NetworkState) -> NetworkState:
    """Add to the state of a run what the logs of this machine say about its nodes here."""
    logs = config.at(config.node.logs)
    state = replace(state, unjudged=unjudged_cases(logs), troubles=troubles(logs, time.time()))
    trainer_time = read_trainer_time(logs)
    if trainer_time is None or state.has_ended:
        return state
    audit_share = node.run.proof.audit_floor_ppm / 1_000_000
    line = bottleneck(trainer_time, state, config.trainer.steps_per_version, audit_share)
    return replace(state, bottleneck=f"trainer {line}")


@dataclass(frozen=True)
class TrainerTime:
    """Shares of the training process's time since its start: waiting for groups, and handing versions to the writer."""

    data: float
    hand_over: float
    is_shared: bool = False  # whether other nodes have their logs on this machine, too


def read_trainer_time(logs: Path) -> TrainerTime | None:
    """Return the newest shares in the log of a trainer of this machine; None if there is no trainer, or no step yet."""
    paths = sorted(logs.glob("*-training.jsonl"), key=lambda path: path.stat().st_mtime)
    if not paths:
        return None
    for event in tail_events(paths[-1]):
        data, hand_over = event.get("data_wait_fraction"), event.get("io_wait_fraction")
        if event.get("event") == "step" and isinstance(data, float | int) and isinstance(hand_over, float | int):
            trainer = paths[-1].name.removesuffix("training.jsonl")
            others = [path for path in logs.glob("*.jsonl") if not path.name.startswith(trainer)]
            return TrainerTime(float(data), float(hand_over), bool(others))
    return None


def bottleneck(shares: TrainerTime, state: NetworkState, steps_per_version: int, audit_share: float) -> str:
    """Return what limits a trainer, and what to add; validators judge at least `audit_share` (0 to 1) of the groups."""
    if shares.data >= _MUCH:
        # No rule asks anybody to judge more of a miner that has no reputation left.
        miners = [miner for miner in state.miners if miner.score > 0 or not miner.rejections]
        submitted, judged = sum(miner.submitted for miner in miners), sum(miner.judged for miner in miners)
        if submitted and judged < _MOST_JUDGED * audit_share * submitted:
            what = f"validators judge {judged:,} of {submitted:,} groups: add validators, or faster ones"
        elif shares.is_shared:
            what = "trainer and miners share this machine's cores"
        else:
            what = "add miners, or let them deliver more groups"
        return f"waits {shares.data:.0%} of its time for verified groups; {what}"
    steps = [row.optimizer_step for row in state.versions[-_RECENT_VERSIONS:]]
    if len(steps) > 1:
        interval = (steps[-1] - steps[0]) / (len(steps) - 1)
        if shares.hand_over >= _MUCH or interval > 1.5 * steps_per_version:
            return (
                f"publishes a version every {interval:.1f} steps instead of {steps_per_version}: storage is slower "
                "than steps; raise steps_per_version, or write to faster disks and links"
            )
    compute = max(0.0, 1.0 - shares.data - shares.hand_over)
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
