"""Lies that a node met, until they are published (docs/spec/verdict.md: a summary's alarms)."""

from typing import Final

_MOST_WAITING: Final = 100  # as many as one summary carries
_MOST_KNOWN: Final = 10_000
_LINE: Final = 500  # characters of one alarm


class Alarms:
    """A queue of distinct lines: what was said once is not said again."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._waiting: list[str] = []

    def add(self, line: str) -> bool:
        """Queue a line; whether it is new. Beyond the limits the newest are dropped: the first ones say what began."""
        line = "".join(character for character in line if character.isprintable())[:_LINE]
        if line in self._known or len(self._known) >= _MOST_KNOWN:
            return False
        self._known.add(line)
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(line)
        return True

    def drain(self) -> tuple[str, ...]:
        """What waits to be published; it waits no more."""
        waiting, self._waiting = tuple(self._waiting), []
        return waiting
