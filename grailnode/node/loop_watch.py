"""Watches the event loop of a process: while one task computes on its thread, no other task goes on, and no head is
renewed. Work that takes long belongs into a worker thread (`Node.run_sync`).
"""

import time
from collections.abc import Callable
from typing import Final

import trio

from roles.ports import Telemetry

LONG_STEP_SECONDS: Final = 0.02
"""Seconds of the processor after which a step of a task is worth a report."""

_REPORT_SECONDS: Final = 60.0  # from one report to the next


class LoopWatch(trio.abc.Instrument):
    """Reports each step of a task that takes more than some seconds of the processor.

    A step goes from one checkpoint of a task to the next. Its processor time is measured and not its duration, because
    that depends on what else the machine does.

    Args:
        report: is called with the name of the task and the seconds.
        seconds: of one step that are not worth a report.
    """

    def __init__(self, report: Callable[[str, float], None], seconds: float) -> None:
        self._report = report
        self._seconds = seconds
        self._began = time.thread_time()  # the step that adds this instrument has begun already

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Called by trio before each step of a task."""
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Called by trio after each step of a task."""
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
