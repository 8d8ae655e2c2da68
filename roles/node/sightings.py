"""Since when a node knows of keys.

Whoever knows the salt of a lottery can make keys that win it, so keys that were listed before the salt was out go
first.
"""

from collections.abc import Iterable

from protocol import limits


class Sightings:
    """The round that was the newest when this node first listed a key; of the newest MAX_LISTED_PARTICIPANTS keys."""

    def __init__(self) -> None:
        self._rounds: dict[bytes, int] = {}

    def add(self, keys: Iterable[bytes], newest_round: int) -> None:
        """Remember keys that are listed now. A key that is no longer listed is forgotten when others need its room."""
        for key in keys:
            self._rounds[key] = self._rounds.pop(key, newest_round)
        for key in list(self._rounds)[: max(0, len(self._rounds) - limits.MAX_LISTED_PARTICIPANTS)]:
            del self._rounds[key]

    def is_older(self, key: bytes, round_number: int) -> bool:
        """Return whether a key was listed before a round was out."""
        return self._rounds.get(key, round_number) < round_number
