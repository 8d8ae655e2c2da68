"""Alarms about dishonest participants that wait for this node's next summary (docs/spec/verdict.md)."""

from typing import Final

_MAX_QUEUED: Final = 100  # as many as one summary carries
_MAX_LINES: Final = 10_000
_MAX_CHARACTERS: Final = 500  # of one alarm


class Alarms:
    """A queue of distinct lines: a line that was queued once is not queued again."""

    def __init__(self) -> None:
        self._lines: set[str] = set()  # all that were ever queued
        self._queue: list[str] = []

    def add(self, line: str) -> bool:
        """Queue a line, and return whether it is new.

        Beyond the limits the newest lines are dropped: the first ones name the cause.
        """
        line = "".join(character for character in line if character.isprintable())[:_MAX_CHARACTERS]
        if line in self._lines or len(self._lines) >= _MAX_LINES:
            return False
        self._lines.add(line)
        if len(self._queue) < _MAX_QUEUED:
            self._queue.append(line)
        return True

    def drain(self) -> tuple[str, ...]:
        """Empty the queue and return its lines, which the caller publishes."""
        lines, self._queue = tuple(self._queue), []
        return lines
