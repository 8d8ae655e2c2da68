"""What a process reports: events as JSON lines in a file, in short on the terminal, and counted for Prometheus. An
operator's own address (`node.alarm_url`) is told of those that should wake somebody.

Long steps of the event loop are such events: while one task computes on the loop's thread, no other task goes on, and
no head is renewed. Work that takes long belongs into a worker thread (`Node.run_sync`).
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

import httpx
import trio

from grailnode.node.metrics import ALARMS, Metrics
from roles.ports import Telemetry

THROTTLE_SECONDS: Final = 600.0
"""From one message of a kind to the next; each has the fields of the last event and says how many there were."""
_ANSWER_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 1.0
_HEADERS: Final = {"Content-Type": "application/json"}


class AlarmSender:
    """Sends messages from a thread of its own: nobody waits for the address, and a process that ends still sends."""

    def __init__(self, url: str, name: str, now: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._name = name
        self._now = now
        self._due: dict[str, float] = {}  # when the next message of a kind may be sent
        self._waiting: dict[str, dict[str, Any]] = {}  # by kind, the message that waits for this
        self._lock, self._changed, self._is_closed = threading.Lock(), threading.Event(), False
        self._thread = threading.Thread(target=self._send_all, name="grailnode-alarms", daemon=True)

    def take(self, kind: str, fields: Mapping[str, str | int | float]) -> None:
        """Send an event if it is an alarm: at once, or when the last message of its kind is long enough ago."""
        if kind not in ALARMS:
            return
        with self._lock:
            count = self._waiting.get(kind, {"count": 0})["count"] + 1
            head = {"time": round(time.time(), 3), "node": self._name, "kind": kind, "meaning": ALARMS[kind]}
            self._waiting[kind] = head | {"count": count, "fields": dict(fields)}
            if self._thread.ident is None:
                self._thread.start()
        self._changed.set()

    def close(self) -> None:
        """Send what waits, and wait for the messages that are on their way, at most as long as one may take."""
        self._is_closed = True
        self._changed.set()
        if self._thread.ident is not None:
            self._thread.join(_ANSWER_SECONDS)

    def _send_all(self) -> None:
        is_last = False
        while not is_last:
            self._changed.wait(_POLL_SECONDS)
            self._changed.clear()
            with self._lock:
                is_last, now = self._is_closed, self._now()
                kinds = [kind for kind in self._waiting if is_last or self._due.get(kind, now) <= now]
                self._due |= dict.fromkeys(kinds, now + THROTTLE_SECONDS)
                messages = [self._waiting.pop(kind) for kind in kinds]
            for message in messages:
                # The log has the event: a node does not stop because somebody's pager does not answer.
                with suppress(Exception):
                    trio.run(self._send, json.dumps(message).encode())

    async def _send(self, message: bytes) -> None:
        """Send a message. The answer is not read, and its head must be complete in time, however slowly it comes."""
        client = httpx.AsyncClient(timeout=_ANSWER_SECONDS)  # which reads certificates first
        with trio.move_on_after(_ANSWER_SECONDS):
            async with client, client.stream("POST", self._url, content=message, headers=_HEADERS):
                pass


Field = str | int | float
_MAX_LIST_CHARACTERS = 40  # on the terminal; the file has the whole list
_DOWNLOAD_REPORT_SECONDS: Final = 3.0  # from one report of a download to the next


class NodeTelemetry:
    """Implements the Telemetry port. The name of the node's process is part of every line and every metric. Every event
    goes to the end of the log as a JSON line, and to the terminal as a short one; those that are alarms also to the
    URL, if there is one. The log's directory is created. If the log cannot be written, the first event says so.
    """

    def __init__(
        self, name: str, log: Path | None = None, terminal: IO[str] | None = None, alarm_url: str = ""
    ) -> None:
        self._name = name
        self._file: IO[str] | None = None
        self._terminal = terminal
        self._alarms = AlarmSender(alarm_url, name) if alarm_url else None
        self.metrics = Metrics(name)
        try:
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                self._file = log.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            self.event("log-unwritable", path=str(log), error=(error.strerror or "cannot be opened").lower())

    def event(self, name: str, **fields: Field) -> None:
        self.metrics.count_event(name, fields)
        if self._alarms is not None:
            self._alarms.take(name, fields)
        now = time.time()
        if self._file is not None:
            line = {"time": round(now, 3), "node": self._name, "event": name, **fields}
            self._write(self._file, json.dumps(line) + "\n")
        if self._terminal is not None:
            clock = time.strftime("%H:%M:%S", time.localtime(now))
            details = " ".join(f"{key}={value if key == 'error' else _short(value)}" for key, value in fields.items())
            self._write(self._terminal, f"{clock} {self._name} {name} {details}\n")

    def close(self) -> None:
        """Wait a moment for alarms that are on their way, before the process ends."""
        if self._alarms is not None:
            self._alarms.close()

    @staticmethod
    def _write(file: IO[str], line: str) -> None:
        try:
            file.write(line)
            file.flush()
        except (OSError, ValueError):
            return  # a full disk or a closed terminal must not stop a node


def _short(value: Field) -> str:
    if isinstance(value, str) and len(value) > _MAX_LIST_CHARACTERS and value.count(",") > 1:
        return f"{value[:_MAX_LIST_CHARACTERS]}..."
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class DownloadReport:
    """Implements the cache's `Progress`: sends an event for each long download, at most one every few seconds."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        # By path: when it began or was resumed, the bytes that had arrived then, and the time of the last event.
        self._downloads: dict[str, tuple[float, int, float]] = {}

    def __call__(self, path: str, arrived_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        start, start_bytes, last_report = self._downloads.pop(path, (now, arrived_bytes, now))
        is_due = now - last_report >= _DOWNLOAD_REPORT_SECONDS
        if arrived_bytes < total_bytes:
            self._downloads[path] = start, start_bytes, now if is_due else last_report
        if not is_due:
            return
        rate = (arrived_bytes - start_bytes) / (now - start)
        self._telemetry.event(
            "downloading",
            object=path,
            percent=round(100 * arrived_bytes / total_bytes, 1),
            bytes=total_bytes,
            bytes_per_second=round(rate),
            seconds_left=round((total_bytes - arrived_bytes) / rate) if rate > 0 else -1,
        )


LONG_STEP_SECONDS: Final = 0.02
"""Seconds of the processor after which a step of a task is worth a report."""

_REPORT_SECONDS: Final = 60.0  # from one report to the next


class LoopWatch(trio.abc.Instrument):
    """Reports each step of a task, by its name, that takes more than some seconds of the processor.

    A step goes from one checkpoint of a task to the next. Its processor time is measured and not its duration, because
    that depends on what else the machine does.
    """

    def __init__(self, report: Callable[[str, float], None], seconds: float) -> None:
        self._report = report
        self._seconds = seconds
        self._began = time.thread_time()  # the step that adds this instrument has begun already

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        seconds = time.thread_time() - self._began
        if seconds > self._seconds:
            self._report(task.name, seconds)


class StepReporter:
    """Says in the log that steps were long: at once, and then for all of a minute together. `now` never goes back."""

    def __init__(self, telemetry: Telemetry, now: Callable[[], float] = time.monotonic) -> None:
        self._telemetry = telemetry
        self._now = now
        self._last_report: float | None = None
        self._steps = 0  # since the last report
        self._longest = (0.0, "")

    def __call__(self, task: str, seconds: float) -> None:
        """Take note of a long step of a task; seconds are of the processor."""
        self._steps += 1
        self._longest = max(self._longest, (seconds, task))
        now = self._now()
        if self._last_report is not None and now - self._last_report < _REPORT_SECONDS:
            return
        seconds, task = self._longest
        self._telemetry.event("event-loop-blocked", task=task, seconds=round(seconds, 3), steps=self._steps)
        self._last_report, self._steps, self._longest = now, 0, (0.0, "")
