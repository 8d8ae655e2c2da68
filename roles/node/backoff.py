"""Exponential backoff for participants that were refused, so that reading junk in storage costs less and less."""

from typing import Final

from protocol import limits

_FIRST_PAUSE: Final = 10.0  # seconds after the first refusal; doubled with each further one
_LONGEST_PAUSE: Final = 600.0


class Backoff:
    """Keys that were refused, and until when they are passed over. Times are in seconds since the Unix epoch."""

    def __init__(self) -> None:
        self._pauses: dict[bytes, tuple[float, float]] = {}  # key -> (end, length)

    def is_backing_off(self, key: bytes, now: float) -> bool:
        """Return whether a key is to be passed over now; a clock that was set back ends every pause."""
        end, _ = self._pauses.get(key, (now, 0.0))
        return now < end <= now + _LONGEST_PAUSE

    def add_refusal(self, key: bytes, now: float) -> None:
        """Begin a pause for a key, twice as long as its last one."""
        _, last_length = self._pauses.pop(key, (0.0, _FIRST_PAUSE / 2))
        if len(self._pauses) >= limits.MAX_LISTED_PARTICIPANTS:
            del self._pauses[next(iter(self._pauses))]
        length = min(_LONGEST_PAUSE, 2 * last_length)
        self._pauses[key] = (now + length, length)

    def forget(self, key: bytes) -> None:
        """Forget the refusals of a key, which was accepted."""
        self._pauses.pop(key, None)
