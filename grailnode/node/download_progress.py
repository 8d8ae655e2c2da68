"""What a node says of a long download: how far, how fast, how long still."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from roles.ports import Telemetry

SECONDS_BETWEEN_REPORTS: Final = 3.0


@dataclass
class _Download:
    """When it began (or went on) and with how many bytes, and when it was last told of."""

    began: float
    first: int
    told: float


class DownloadReport:
    """Tells telemetry of downloads, each at most every few seconds. Called with a path, the bytes that are there, and
    all.

    Args:
        now: seconds of a clock that never goes back.
    """

    def __init__(self, telemetry: Telemetry, now: Callable[[], float] = time.monotonic) -> None:
        self._telemetry = telemetry
        self._now = now
        self._downloads: dict[str, _Download] = {}

    def __call__(self, path: str, done: int, total: int) -> None:
        now = self._now()
        download = self._downloads.setdefault(path, _Download(now, done, now))
        if done >= total:
            del self._downloads[path]
        if now - download.told < SECONDS_BETWEEN_REPORTS:
            return
        download.told = now
        rate = (done - download.first) / (now - download.began)
        self._telemetry.event(
            "downloading",
            object=path,
            percent=round(100 * done / total, 1),
            bytes=total,
            bytes_per_second=round(rate),
            seconds_left=round((total - done) / rate) if rate > 0 else -1,
        )
