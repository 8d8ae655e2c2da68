"""Time from the machine's clock; in a simulation, from trio's virtual one."""

import time

import trio


class SystemClock:
    """Wall-clock time, for deadlines that other nodes must agree on."""

    def now(self) -> float:
        """Seconds since the Unix epoch."""
        return time.time()

    async def sleep_until(self, moment: float) -> None:
        """Return at or after a moment. Asks the clock again at least once a second, in case somebody sets it."""
        while (left := moment - self.now()) > 0:
            await trio.sleep(min(left, 1.0))
        await trio.lowlevel.checkpoint()


class TrioClock:
    """Trio's own clock, shifted to begin at a moment: with trio's MockClock, ten hours take ten milliseconds."""

    def __init__(self, begin: float) -> None:
        self._shift = begin - trio.current_time()

    def now(self) -> float:
        """Seconds since the Unix epoch."""
        return trio.current_time() + self._shift

    async def sleep_until(self, moment: float) -> None:
        """Return at or after a moment."""
        await trio.sleep_until(moment - self._shift)
