"""The logs of this machine's nodes: their events, for what a process waits, how often it was started lately, and what
limits the nodes: the trainer's time, and what validators did not judge.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from grailnode.config import Config
from grailnode.observe.state import NetworkState
from protocol.run import RunManifest
from roles.node.identity import Node
from roles.node.retries import WAIT_REPORT_SECONDS

_TAIL_BYTES: Final = 1 << 16
_MAX_BYTES: Final = 1 << 20  # read of one log at a time
_WAIT_SECONDS: Final = WAIT_REPORT_SECONDS + 60.0  # an older report is that of a process that was killed
_RECENT_SECONDS: Final = 3600.0
_MANY_STARTS: Final = 3


def tail_events(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the events at the end of a log, the newest first; none of one that is not there or another user's."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return
    yield from _events(reversed(lines))


def _events(lines: Iterable[bytes]) -> Iterator[Mapping[str, Any]]:
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue  # a part of a line: of a tail the first one, or one that a killed process began
        if isinstance(event, dict):
            yield event


class LogFollower:
    """The events that are written from now on."""

    def __init__(self, paths: Sequence[Path], *, from_start: bool = False) -> None:
        self._offsets = {path: 0 if from_start or not path.exists() else path.stat().st_size for path in paths}

    def read(self) -> Iterator[Mapping[str, Any]]:
        """Yield the events whose lines are complete, log by log."""
        for path, offset in self._offsets.items():
            if not path.exists():
                continue
            with path.open("rb") as file:
                begin = offset if path.stat().st_size >= offset else 0  # somebody may have emptied it
                file.seek(begin)
                data = file.read(_MAX_BYTES)
            end = data.rfind(b"\n") + 1 or (len(data) if len(data) == _MAX_BYTES else 0)
            self._offsets[path] = begin + end
            yield from _events(data[:end].splitlines())


def recent_starts(path: Path, now: float) -> tuple[int, str, str]:
    """Return how often the process of a log was started in the last hour, the first such time, and its last failure."""
    starts, since, cause = 0, now, ""
    for event in tail_events(path):
        if not isinstance(moment := event.get("time"), int | float) or moment < now - _RECENT_SECONDS:
            break
        if event.get("event") == "started":
            starts, since = starts + 1, moment
        elif event.get("event") == "failed":
            cause = cause or str(event.get("error"))
    return starts, _clock(since), cause or "none in its log"


def equal_failures(path: Path, error: str, place: str) -> int:
    """Return how many of a log's last faults have this text and place; failures without a place are left out."""
    faults = (event for event in tail_events(path) if event.get("event") == "failed" and "place" in event)
    return sum(1 for _ in takewhile(lambda event: (event.get("error"), event["place"]) == (error, place), faults))


def troubles(logs: Path, now: float) -> tuple[str, ...]:
    """Return a line for each process of this machine that waits, or was started often lately; `now` is Unix time."""
    lines = []
    for path in sorted(logs.glob("*.jsonl")):
        lines += [f"{path.stem} waits for {line}" for line in _waits(path, now)]
        starts, since, cause = recent_starts(path, now)
        if starts >= _MANY_STARTS:
            lines.append(f"{path.stem} was started {starts} times since {since}, last cause: {cause}")
    return tuple(lines)


def _waits(path: Path, now: float) -> Iterator[str]:
    names: set[str] = set()
    for event in tail_events(path):
        moment, waits_for = event.get("time"), event.get("waits_for")
        if event.get("event") == "started" or not isinstance(moment, int | float) or moment < now - _WAIT_SECONDS:
            return
        if isinstance(waits_for, str) and waits_for not in names:
            names.add(waits_for)
            if event.get("event") != "waited":
                since = _clock(moment - float(event.get("seconds", 0.0)))
                yield f"{waits_for} since {since}: {event.get('error')} (it ends when {event.get('until')})"


def _clock(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment))


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
    line = bottleneck(trainer_time, state, config.trainer.steps_per_version, node.run)
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


def bottleneck(shares: TrainerTime, state: NetworkState, steps_per_version: int, run: RunManifest) -> str:
    """Return what limits a trainer, and what to add."""
    if shares.data >= _MUCH:
        # No rule asks anybody to judge more of a miner that has no reputation left.
        miners = [miner for miner in state.miners if miner.score > 0 or not miner.rejections]
        submitted, judged = sum(miner.submitted for miner in miners), sum(miner.judged for miner in miners)
        due = 0.0  # groups that validators judge if they keep up: each miner's least share, or as a verdict has room
        for miner in miners:
            groups_per_window = min(run.groups, miner.submitted // max(1, len(state.recent.get(miner.key, ()))))
            least_share = min(run.proof.audit_floor_ppm, run.largest_share(groups_per_window))
            due += least_share / 1_000_000 * miner.submitted
        if judged < _MOST_JUDGED * due:
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
