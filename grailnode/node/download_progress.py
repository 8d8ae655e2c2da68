"""Reports the progress of long downloads to telemetry: percent, bytes per second, seconds remaining."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from roles.ports import Telemetry

SECONDS_BETWEEN_REPORTS: Final = 3.0


@dataclass
class _Download:
    """A download under way. Times are seconds of a monotonic clock.

    Attributes:
        start: when it began or was resumed.
        start_bytes: bytes that had arrived at that moment.
        last_report: when telemetry last received an event about it.
    """

    start: float
    start_bytes: int
    last_report: float


class DownloadReport:
    """Implements the cache's `Progress`: sends an event for each download, at most one every few seconds.

    Args:
        now: seconds of a clock that never goes back.
    """

    def __init__(self, telemetry: Telemetry, now: Callable[[], float] = time.monotonic) -> None:
        self._telemetry = telemetry
        self._now = now
        self._downloads: dict[str, _Download] = {}

    def __call__(self, path: str, arrived_bytes: int, total_bytes: int) -> None:
        now = self._now()
        download = self._downloads.setdefault(path, _Download(now, arrived_bytes, now))
        if arrived_bytes >= total_bytes:
            del self._downloads[path]
        if now - download.last_report < SECONDS_BETWEEN_REPORTS:
            return
        download.last_report = now
        rate = (arrived_bytes - download.start_bytes) / (now - download.start)
        self._telemetry.event(
            "downloading",
            object=path,
            percent=round(100 * arrived_bytes / total_bytes, 1),
            bytes=total_bytes,
            bytes_per_second=round(rate),
            seconds_left=round((total_bytes - arrived_bytes) / rate) if rate > 0 else -1,
        )
