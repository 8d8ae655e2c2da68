"""Follows the logs of a trainer's processes: their new lines, as events."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_MAX_BYTES: Final = 1 << 20  # read of one log at a time


class LogFollower:
    """The events that are written from now on.

    Args:
        paths: of the logs (JSON lines); they may not exist yet.
        from_start: whether to begin with what the logs have already.
    """

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
            yield from _events(data[:end])


def _events(data: bytes) -> Iterator[Mapping[str, Any]]:
    for line in data.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # the end of a line that a killed process began
        if isinstance(event, dict):
            yield event
