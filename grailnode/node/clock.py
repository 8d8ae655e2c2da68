"""Time from the machine's clock."""

import time

import trio

_MAX_SLEEP_SECONDS = 1.0


class SystemClock:
    """Wall-clock time, for deadlines that nodes must agree on."""

    def now(self) -> float:
        """Return the seconds since the Unix epoch."""
        return time.time()

    async def sleep_until(self, moment: float) -> None:
        """Return at or after a moment (seconds since the Unix epoch).

        The clock is read at least once a second, because an operator may set it meanwhile.
        """
        while (remaining := moment - self.now()) > 0:
            await trio.sleep(min(remaining, _MAX_SLEEP_SECONDS))
        await trio.lowlevel.checkpoint()
