"""Watches the event loop of a process: while one task computes on its thread, no other task goes on, and no head is
renewed. Work that takes long belongs into a worker thread (`Node.run_sync`).
"""

import time
from collections.abc import Callable

import trio


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
        self._began = 0.0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Called by trio before each step of a task."""
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Called by trio after each step of a task."""
        seconds = time.thread_time() - self._began
        if seconds > self._seconds:
            self._report(task.name, seconds)
