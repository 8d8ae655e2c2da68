"""An error that repeats is reported once, and again when its text changes, so that an outage does not fill the log."""

import math

from roles.ports import Telemetry


class ChangeReporter:
    """Reports the errors of one action that is tried again and again, each as an event of one name.

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
