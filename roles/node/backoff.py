"""What was refused is not looked at again for a while, longer each time: junk in storage costs less the longer it lies
there.
"""

from typing import Final

from protocol import limits

_FIRST_REST: Final = 10.0  # seconds after the first refusal; doubled each time
_LONGEST_REST: Final = 600.0


class Backoff:
    """Keys that were refused, and until when they rest. Times are in seconds since the Unix epoch."""

    def __init__(self) -> None:
        self._rests: dict[bytes, tuple[float, float]] = {}  # key -> (until, length)

    def resting(self, key: bytes, now: float) -> bool:
        """Whether a key is not to be looked at yet; a clock that went back ends every rest."""
        until, _ = self._rests.get(key, (now, 0.0))
        return now < until <= now + _LONGEST_REST

    def add(self, key: bytes, now: float) -> None:
        """Another refusal."""
        _, before = self._rests.pop(key, (0.0, _FIRST_REST / 2))
        if len(self._rests) >= limits.MAX_LISTED_PARTICIPANTS:
            del self._rests[next(iter(self._rests))]
        rest = min(_LONGEST_REST, 2 * before)
        self._rests[key] = (now + rest, rest)

    def forget(self, key: bytes) -> None:
        """It was accepted."""
        self._rests.pop(key, None)
