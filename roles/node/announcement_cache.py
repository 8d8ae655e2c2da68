"""Announcements whose signature was checked: the same bytes need not be checked again in the next window."""

from protocol import limits
from protocol.digest import content_digest
from protocol.identity.participant import Announcement


class AnnouncementCache:
    """The newest checked announcement of each key; the oldest are forgotten where there are too many."""

    def __init__(self) -> None:
        self._checked: dict[bytes, tuple[bytes, Announcement]] = {}

    def get(self, key: bytes, data: bytes) -> Announcement | None:
        """The announcement of these bytes, if they were checked for this key."""
        digest, record = self._checked.get(key, (b"", None))
        return record if record is not None and digest == content_digest(data) else None

    def add(self, key: bytes, data: bytes, record: Announcement) -> None:
        """These bytes are this key's announcement."""
        self._checked.pop(key, None)
        if len(self._checked) >= limits.MAX_PARTICIPANTS:
            del self._checked[next(iter(self._checked))]
        self._checked[key] = content_digest(data), record
