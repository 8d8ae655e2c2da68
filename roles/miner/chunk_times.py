"""How long a miner's chunks of groups take, by which it promises only what a window has time for.

A larger chunk takes no less time than a smaller one, and each of its groups no more: on a GPU one group may take as
long as eight. So a chunk that was measured bounds those of all other sizes, and a slow one does not make the miner
promise ever less.
"""

from collections import deque
from typing import Final

_REMEMBERED: Final = 4


class ChunkTimes:
    """The last chunks: how many groups each had, and the seconds that it took."""

    def __init__(self) -> None:
        self._chunks: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)

    def add(self, groups: int, seconds: float) -> None:
        """Take over how long a chunk of so many groups took."""
        # An older chunk that would contradict this one was computed while the machine was faster.
        slower = [(size, max(time, seconds * min(1.0, size / groups))) for size, time in self._chunks]
        self._chunks = deque([*slower, (groups, seconds)], maxlen=_REMEMBERED)

    def of(self, groups: int) -> float:
        """Return how long a chunk of so many groups takes at most; 0 before the first measurement."""
        slowest: dict[int, float] = {}
        for size, time in self._chunks:
            slowest[size] = max(time, slowest.get(size, 0.0))
        return min((time * max(1.0, groups / size) for size, time in slowest.items()), default=0.0)

    def affordable(self, seconds: float, size: int, most: int) -> int:
        """Return how many groups, at least 1, there is time for: whole chunks if one fits, else a part of one."""
        if whole := self.of(size):
            chunks = int(seconds / whole)
            part = max((groups for groups in range(1, size) if self.of(groups) <= seconds), default=1)
            return min(most, chunks * size or part)
        return most
