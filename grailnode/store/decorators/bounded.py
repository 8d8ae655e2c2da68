"""Bounds the listings of a store: their length, and what they contain."""

from collections.abc import AsyncIterator
from typing import Final

from roles.ports import ObjectInfo, ObjectStore, StoreError

MAX_ENTRIES: Final = 1 << 17
"""Entries of one listing, repeated ones included: objects of 4,096 participants and 32 windows, some 10 MB of paths."""


class BoundedStore:
    """Decorates a store whose listings may have duplicates or foreign paths, or may never end.

    The order stays as the store gives it: nothing may depend on it, and some services have none.

    Args:
        store: any store.
        max_entries: entries of one listing.
    """

    def __init__(self, store: ObjectStore, max_entries: int = MAX_ENTRIES) -> None:
        self._store = store
        self._max_entries = max_entries
        self.put, self.get, self.delete = store.put, store.get, store.delete

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list.

        Raises:
            StoreError: the listing failed, or did not end within `max_entries`.
        """
        paths: set[str] = set()
        count = 0
        async for info in self._store.list(prefix, after=after):
            count += 1
            if count > self._max_entries:
                raise StoreError(
                    f"{prefix}: the listing has more than {self._max_entries} entries; a participant writes too many "
                    "objects there, or the storage repeats them without end"
                )
            if info.path.startswith(prefix) and info.path > after and info.path not in paths:
                paths.add(info.path)
                yield info
