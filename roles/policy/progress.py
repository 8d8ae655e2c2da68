"""Progress of a follower on its way to a version: how far, how fast, how long still."""

from roles.ports import Clock, Telemetry

SECONDS_BETWEEN_REPORTS = 2.0


class CatchUpProgress:
    """Tells telemetry of a way of several steps; of a single patch it says nothing.

    Args:
        version: where the way ends.
        sizes: bytes of each step, in order.
    """

    def __init__(self, clock: Clock, tell: Telemetry, version: int, sizes: list[int]) -> None:
        self._now = clock.now
        self._tell = tell
        self._version = version
        self._sizes = sizes
        self._total = max(1, sum(sizes))
        self._fetched = self._applied = self._steps = 0
        self._began = self._told = clock.now()

    def fetched(self, size: int) -> None:
        """So many more bytes have arrived."""
        self._fetched += size
        self._report()

    def applied(self) -> None:
        """The next step was taken."""
        self._applied += self._sizes[self._steps]
        self._steps += 1
        self._report()

    def _report(self) -> None:
        now = self._now()
        done = self._steps == len(self._sizes)
        if len(self._sizes) < 2 or not (done or now - self._told >= SECONDS_BETWEEN_REPORTS):
            return
        self._told = now
        seconds = max(1e-3, now - self._began)
        if done:
            self._tell.event("caught-up", version=self._version, bytes=self._total, seconds=round(seconds, 3))
            return
        # half of the work is to fetch a byte, half is to apply it
        rate = (self._fetched + self._applied) / 2 / seconds
        left = self._total - (self._fetched + self._applied) / 2
        self._tell.event(
            "catching-up",
            version=self._version,
            step=self._steps,
            steps=len(self._sizes),
            percent=round(100 * self._fetched / self._total, 1),
            bytes=self._total,
            bytes_per_second=round(self._fetched / seconds),
            seconds_left=round(left / rate) if rate > 0 else -1,
        )
