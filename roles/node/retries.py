"""For what is tried again and again: how long to wait before the next try, and which errors to report."""

import math
from dataclasses import dataclass

from roles.ports import Telemetry


@dataclass(frozen=True)
class Pause:
    """Pauses that grow from try to try.

    Attributes:
        first, longest: seconds.
    """

    first: float
    longest: float
    factor: float = 2.0

    def after(self, last: float = 0.0) -> float:
        """Return the seconds of the pause that follows one of `last` seconds; without it, of the first one."""
        return min(self.longest, max(self.first, self.factor * last))


class ChangeReporter:
    """Reports the errors of one action that is tried again and again, each as an event of one name.

    An error that repeats is reported once, and again when its text changes, so that an outage does not fill the log.

    Args:
        max_reports: how many events at most until the action succeeds. For errors whose text somebody else chooses.
        fields: what every event carries besides `error`.
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

    def success(self) -> None:
        """Begin anew: the next error is reported whatever its text."""
        self._last_error = None
        self._reports = 0
