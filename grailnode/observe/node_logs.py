"""The logs of this machine's nodes: their events, for what a process waits, and how often it was started lately."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

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
