"""Announcements whose signature was checked: the same bytes need not be checked again in the next window."""

from protocol import limits
from protocol.digest import content_digest
from protocol.identity.participant import Announcement


class AnnouncementCache:
    """The newest checked announcement of each key; beyond the limit the oldest are dropped."""

    def __init__(self) -> None:
        self._entries: dict[bytes, tuple[bytes, Announcement]] = {}  # key -> (digest of the bytes, announcement)

    def get(self, key: bytes, data: bytes) -> Announcement | None:
        """Return the announcement in these bytes if they were checked for this key, else None."""
        digest, record = self._entries.get(key, (b"", None))
        return record if record is not None and digest == content_digest(data) else None

    def add(self, key: bytes, data: bytes, record: Announcement) -> None:
        """Remember that these bytes are this key's checked announcement."""
        self._entries.pop(key, None)
        if len(self._entries) >= limits.MAX_PARTICIPANTS:
            del self._entries[next(iter(self._entries))]
        self._entries[key] = content_digest(data), record
