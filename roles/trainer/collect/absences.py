"""Which validators do not seal: reported when that begins and when it ends, not for every window between."""

from roles.ports import Telemetry


class Absences:
    """The validators whose seals do not come in time.

    `validator-excluded` with the first window that a validator does not seal in time stands for all that follow, until
    `validator-sealed-again` names the next window that it seals.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._first_windows: dict[bytes, int] = {}  # by absent validator
        self._sealed_windows: dict[bytes, int] = {}  # by validator, the newest that it sealed in time

    def add(self, validator: bytes, window: int) -> None:
        """Report a window that a validator did not seal in time, unless it is part of an absence that is reported."""
        first_window = self._first_windows.get(validator)
        if window < self._sealed_windows.get(validator, 0):  # windows may be read in any order
            self._report_exclusion(validator, window, "not sealed in time, but a later one was")
        elif first_window is None or window < first_window:
            self._first_windows[validator] = window
            self._report_exclusion(validator, window, "not sealed in time")

    def end(self, validator: bytes, window: int) -> None:
        """Report that a validator sealed a window in time, if it was absent before."""
        self._sealed_windows[validator] = max(window, self._sealed_windows.get(validator, 0))
        first_window = self._first_windows.get(validator, window)
        if first_window < window:
            del self._first_windows[validator]
            self._telemetry.event(
                "validator-sealed-again",
                window=window,
                validator=validator.hex()[:8],
                windows_missed=window - first_window,
            )

    def _report_exclusion(self, validator: bytes, window: int, error: str) -> None:
        self._telemetry.event("validator-excluded", window=window, validator=validator.hex()[:8], error=error)
