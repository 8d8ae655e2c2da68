"""Trio's clock as wall-clock time, for simulations."""

import trio


class TrioClock:
    """Implements the Clock port on trio's clock, shifted so that it begins at a given moment.

    With trio's MockClock, ten simulated hours take ten milliseconds.

    Args:
        begin: seconds since the Unix epoch.
    """

    def __init__(self, begin: float) -> None:
        self._shift = begin - trio.current_time()

    def now(self) -> float:
        """Return the seconds since the Unix epoch."""
        return trio.current_time() + self._shift

    async def sleep_until(self, moment: float) -> None:
        """Return at or after a moment (seconds since the Unix epoch)."""
        await trio.sleep_until(moment - self._shift)
