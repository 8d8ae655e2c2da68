"""What a node remembers about other participants while it runs: alarms, refusals, checked announcements, sightings,
silent miners, and requests for revisions.
"""

from collections.abc import Iterable
from typing import Final

import trio

from protocol import limits
from protocol.encoding import content_digest
from protocol.identity.authority import Revision
from protocol.identity.participant import Announcement
from protocol.identity.signing import Signed
from roles.node.retries import Pause

_MAX_QUEUED: Final = 100  # as many as one summary carries
_MAX_LINES: Final = 10_000
_MAX_CHARACTERS: Final = 500  # of one alarm


class Alarms:
    """Alarms about dishonest participants, each once, that wait for the next summary (docs/spec/verdict.md)."""

    def __init__(self) -> None:
        self._lines: set[str] = set()  # all that were ever queued
        self._queue: list[str] = []

    def add(self, line: str) -> bool:
        """Queue a line, and return whether it is new. Above a limit it is dropped: the first ones name the cause."""
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


_REFUSAL: Final = Pause(first=10.0, longest=600.0)


class Backoff:
    """Keys that were refused, passed over for longer and longer (seconds since the Unix epoch): junk costs less."""

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


class AnnouncementCache:
    """Each key's newest announcement whose signature was checked, so that equal bytes need no other check."""

    def __init__(self) -> None:
        self._entries: dict[bytes, tuple[bytes, Announcement]] = {}  # key -> (digest of the bytes, announcement)

    def get(self, key: bytes, data: bytes) -> Announcement | None:
        """Return the announcement in these bytes if they were checked for this key, else None."""
        digest, record = self._entries.get(key, (b"", None))
        return record if record is not None and digest == content_digest(data) else None

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def forget(self, key: bytes) -> None:
        """Forget the announcement of a key, which shows one now that is not admitted."""
        self._entries.pop(key, None)

    def add(self, key: bytes, data: bytes, record: Announcement) -> None:
        """Remember that these bytes are this key's checked announcement."""
        self._entries.pop(key, None)
        if len(self._entries) >= limits.MAX_PARTICIPANTS:
            del self._entries[next(iter(self._entries))]
        self._entries[key] = content_digest(data), record


class Sightings:
    """The round that was the newest when this node first listed a key; of as many keys as both parts of a cut listing
    have, so that the keys of one part are not forgotten for those of the other.

    Whoever knows the salt of a lottery can make keys that win it, so keys that were listed before the salt was out go
    first.
    """

    def __init__(self) -> None:
        self._rounds: dict[bytes, int] = {}

    def add(self, keys: Iterable[bytes], newest_round: int) -> None:
        """Remember keys that are listed now. A key that is no longer listed is forgotten when others need its room."""
        for key in keys:
            self._rounds[key] = self._rounds.pop(key, newest_round)
        for key in list(self._rounds)[: max(0, len(self._rounds) - 2 * limits.MAX_LISTED_PARTICIPANTS)]:
            del self._rounds[key]

    def is_older(self, key: bytes, round_number: int) -> bool:
        """Return whether a key was listed before a round was out."""
        return self._rounds.get(key, round_number) < round_number


class SilentMiners:
    """Miners whose storage did not answer since a commitment was last read there. Those of them that are known to work
    are asked after all others that are, and newcomers after all other newcomers.
    """

    def __init__(self) -> None:
        self._miners: dict[bytes, None] = {}

    def __contains__(self, miner: bytes) -> bool:
        return miner in self._miners

    def add(self, miners: Iterable[bytes]) -> None:
        """Remember miners that were silent, and forget those for whom there is no room."""
        self._miners.update(dict.fromkeys(miners))
        for miner in list(self._miners)[: max(0, len(self._miners) - 2 * limits.MAX_WINDOW_MINERS)]:
            del self._miners[miner]

    def forget(self, miner: bytes) -> None:
        """Forget a miner that has delivered."""
        self._miners.pop(miner, None)


class RevisionRequests:
    """The requests for revisions under way, which outlive the looks that made them (roles/authority_updates.py)."""

    def __init__(self) -> None:
        self.is_first_look = True  # until a look in all places is over
        self.ends: dict[str, trio.Event] = {}  # by path: set when the request under way has ended
        self.valid: dict[bytes, Signed[Revision]] = {}  # new revisions that came and wait for a look, by digest
        self.failure: Exception | None = None  # neither storage's nor a place's, for the next look to raise
        self.patience = trio.CancelScope()  # of the newest look's wait
