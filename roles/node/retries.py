"""For what is tried again and again: how long to wait before the next try, and which errors to report."""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import trio

from roles.ports import StoreError, Telemetry

Result = TypeVar("Result")

WAIT_REPORT_SECONDS: Final = 600.0
"""From one report of a wait to the next, while nothing changes."""


@dataclass(frozen=True)
class Pause:
    """Pauses that grow from try to try."""

    first: float  # seconds
    longest: float  # seconds
    factor: float = 2.0

    def after(self, last: float = 0.0) -> float:
        """Return the seconds of the pause that follows one of `last` seconds; without it, of the first one."""
        return min(self.longest, max(self.first, self.factor * last))


class ChangeReporter:
    """Reports the errors of one action that is tried again and again, as events with some fields. An error that repeats
    is reported once, and again when its text changes, but not more than `max_reports`: somebody else may choose the
    text.
    """

    def __init__(
        self, telemetry: Telemetry, event: str, *, max_reports: float = math.inf, **fields: str | int | float
    ) -> None:
        self._telemetry = telemetry
        self._event = event
        self._max_reports = max_reports
        self._fields = fields
        self._last_error: str | None = None
        self._reports = 0

    def failure(self, error: Exception) -> None:
        """Report an error unless the last one had the same text."""
        text = str(error)
        if text != self._last_error and self._reports < self._max_reports:
            self._telemetry.event(self._event, **self._fields, error=text)
            self._reports += 1
        self._last_error = text


class WaitReporter:
    """Reports what a process waits for: at the beginning, when the cause changes, then rarely, and at the end.

    Each report says in `waits_for` for what, in `seconds` for how long, in `error` why, and in `until` what ends it, so
    that log, metrics and `grailnode status` say the same. The report of the end is the event `waited`, which comes with
    the end of a `with` block, too.
    """

    def __init__(self, telemetry: Telemetry, event: str) -> None:
        self._telemetry = telemetry
        self._event = event
        self._waits_for = ""
        self._cause: object = None
        self._since = self._last_report = 0.0  # in trio's seconds

    def waiting(self, waits_for: str, error: object, until: str, cause: object = None) -> None:
        """Report a try that failed, unless it was reported a short time ago.

        `waits_for` is "disk", "clock", "beacon" or "storage". It is another wait when `cause`, or the error, differs.
        """
        now, cause = trio.current_time(), str(error) if cause is None else cause
        if self._waits_for != waits_for:
            self.over()
            self._waits_for, self._since = waits_for, now
        elif self._cause == cause and now - self._last_report < WAIT_REPORT_SECONDS:
            return
        self._cause, self._last_report = cause, now
        seconds = round(now - self._since, 1)
        self._telemetry.event(self._event, waits_for=waits_for, seconds=seconds, error=str(error), until=until)

    def over(self) -> None:
        """Report that the wait has ended, if there was one."""
        if self._waits_for:
            seconds = round(trio.current_time() - self._since, 1)
            self._telemetry.event("waited", waits_for=self._waits_for, seconds=seconds)
        self._waits_for, self._cause = "", None

    def __enter__(self) -> "WaitReporter":
        return self

    def __exit__(self, *_: object) -> None:
        self.over()


async def keep_trying(
    work: Callable[[], Awaitable[Result]], reporter: WaitReporter, until: str, seconds: float
) -> Result:
    """Return what a work returns, tried again after some seconds as often as storage fails; report the wait."""
    with reporter:
        while True:
            try:
                return await work()
            except StoreError as error:
                reporter.waiting("storage", error, until)
                await trio.sleep(seconds)
