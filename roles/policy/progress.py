"""Progress of a follower that catches up with a version: how far it is, how fast, and how long it still takes."""

from roles.ports import Clock, Telemetry

SECONDS_BETWEEN_REPORTS = 2.0


class CatchUpProgress:
    """Reports the progress of several steps to telemetry; of a single step nothing.

    Args:
        version: the version after the last step.
        sizes: bytes of each step, in order.
    """

    def __init__(self, clock: Clock, telemetry: Telemetry, version: int, sizes: list[int]) -> None:
        self._now = clock.now
        self._telemetry = telemetry
        self._version = version
        self._sizes = sizes
        self._total_bytes = max(1, sum(sizes))
        self._fetched_bytes = self._applied_bytes = self._finished_steps = 0
        self._start = self._last_report = clock.now()

    def add_fetched(self, size: int) -> None:
        """Add bytes that have arrived."""
        self._fetched_bytes += size
        self._report()

    def finish_step(self) -> None:
        """Add the next step, which was applied."""
        self._applied_bytes += self._sizes[self._finished_steps]
        self._finished_steps += 1
        self._report()

    def _report(self) -> None:
        now, total_bytes = self._now(), self._total_bytes
        complete = self._finished_steps == len(self._sizes)
        if len(self._sizes) < 2 or not (complete or now - self._last_report >= SECONDS_BETWEEN_REPORTS):
            return
        self._last_report = now
        seconds = max(1e-3, now - self._start)
        if complete:
            self._telemetry.event("caught-up", version=self._version, bytes=total_bytes, seconds=round(seconds, 3))
            return
        # half of the work is to fetch a byte, half is to apply it
        rate = (self._fetched_bytes + self._applied_bytes) / 2 / seconds
        remaining_bytes = total_bytes - (self._fetched_bytes + self._applied_bytes) / 2
        self._telemetry.event(
            "catching-up",
            version=self._version,
            step=self._finished_steps,
            steps=len(self._sizes),
            percent=round(100 * self._fetched_bytes / total_bytes, 1),
            bytes=total_bytes,
            bytes_per_second=round(self._fetched_bytes / seconds),
            seconds_left=round(remaining_bytes / rate) if rate > 0 else -1,
        )
