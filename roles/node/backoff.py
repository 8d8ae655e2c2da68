"""Exponential backoff: how long to wait before the next try, and which participants are not read again yet."""

from dataclasses import dataclass
from typing import Final

from protocol import limits


@dataclass(frozen=True)
class Pause:
    """Pauses that grow from try to try.

    Attributes:
        first, longest: seconds.
        factor: by which a pause is longer than the one before.
    """

    first: float
    longest: float
    factor: float = 2.0

    def after(self, last: float = 0.0) -> float:
        """Return the seconds of the pause that follows one of `last` seconds; without it, of the first one."""
        return min(self.longest, max(self.first, self.factor * last))


_REFUSAL: Final = Pause(first=10.0, longest=600.0)


class Backoff:
    """Keys that were refused, and until when they are passed over, so that reading junk in storage costs less and less.

    Times are in seconds since the Unix epoch.
    """

    def __init__(self) -> None:
        self._pauses: dict[bytes, tuple[float, float]] = {}  # key -> (end, length)

    def is_backing_off(self, key: bytes, now: float) -> bool:
        """Return whether a key is to be passed over now; a clock that was set back ends every pause."""
        end, _ = self._pauses.get(key, (now, 0.0))
        return now < end <= now + _REFUSAL.longest

    def add_refusal(self, key: bytes, now: float) -> None:
        """Begin a pause for a key, twice as long as its last one."""
        _, last_length = self._pauses.pop(key, (0.0, 0.0))
        if len(self._pauses) >= limits.MAX_LISTED_PARTICIPANTS:
            del self._pauses[next(iter(self._pauses))]
        length = _REFUSAL.after(last_length)
        self._pauses[key] = (now + length, length)

    def forget(self, key: bytes) -> None:
        """Forget the refusals of a key, which was accepted."""
        self._pauses.pop(key, None)
