"""What a node says of itself: events as JSON lines in a file, and in short on the terminal; numbers for Prometheus."""

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import IO

Field = str | int | float
_MOST_SHOWN = 40  # characters of a list


class Telemetry:
    """Implements the Telemetry port.

    Args:
        name: of the node's process, in every line.
        file: takes every event as a JSON line; None for nowhere.
        terminal: takes a short line for every event; None for nowhere.
    """

    def __init__(self, name: str, file: IO[str] | None = None, terminal: IO[str] | None = None) -> None:
        self._name = name
        self._file = file
        self._terminal = terminal
        self._gauges: dict[str, float] = {}
        self._counts: dict[str, float] = defaultdict(float)
        self._events: dict[str, int] = defaultdict(int)

    @classmethod
    def to_file(cls, name: str, path: Path, terminal: IO[str] | None = None) -> "Telemetry":
        """Telemetry into a file that grows; its directory is made. Where that cannot be, the terminal alone is told so."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return cls(name, path.open("a", encoding="utf-8", buffering=1), terminal)
        except OSError as error:
            telemetry = cls(name, None, terminal)
            telemetry.event("log-unwritable", path=str(path), error=(error.strerror or "cannot be opened").lower())
            return telemetry

    def event(self, name: str, **fields: Field) -> None:
        """Something happened."""
        moment = time.time()
        self._events[name] += 1
        if self._file is not None:
            line = {"time": round(moment, 3), "node": self._name, "event": name, **fields}
            self._write(self._file, json.dumps(line) + "\n")
        if self._terminal is not None:
            clock = time.strftime("%H:%M:%S", time.localtime(moment))
            details = " ".join(f"{key}={_short(value)}" for key, value in fields.items())
            self._write(self._terminal, f"{clock} {self._name} {name} {details}\n")

    @staticmethod
    def _write(file: IO[str], line: str) -> None:
        try:
            file.write(line)
            file.flush()
        except (OSError, ValueError):
            return  # a full disk or a closed terminal must not stop a node

    def gauge(self, name: str, value: float) -> None:
        """A quantity now stands at a value."""
        self._gauges[name] = value

    def count(self, name: str, amount: float = 1.0) -> None:
        """A quantity that only grows grew."""
        self._counts[name] += amount

    def exposition(self) -> str:
        """The numbers in Prometheus' text format."""
        node = f'node="{self._name}"'
        lines = []
        for name, value in sorted(self._gauges.items()):
            lines += [f"# TYPE grailnode_{name} gauge", f"grailnode_{name}{{{node}}} {value!r}"]
        for name, value in sorted(self._counts.items()):
            lines += [f"# TYPE grailnode_{name}_total counter", f"grailnode_{name}_total{{{node}}} {value!r}"]
        lines.append("# TYPE grailnode_events_total counter")
        lines += [
            f'grailnode_events_total{{{node},event="{event}"}} {count}' for event, count in sorted(self._events.items())
        ]
        return "\n".join(lines) + "\n"


def _short(value: Field) -> str:
    if isinstance(value, str) and len(value) > _MOST_SHOWN and value.count(",") > 1:
        return f"{value[:_MOST_SHOWN]}..."  # a list; the file has all of it
    return f"{value:.4g}" if isinstance(value, float) else str(value)
