"""Listings that end: no object twice, none that was not asked for, and no more than a node can hold."""

from collections.abc import AsyncIterator
from typing import Final

from roles.ports import ObjectInfo, ObjectStore, StoreError

MAX_LISTED: Final = 1 << 17
"""Entries of one listing, repeated ones included: 4,096 participants' objects of 32 windows, some 10 MB of paths."""


class BoundedStore:
    """Decorates a store whose listings may repeat, stray, come out of order or never end.

    Order is left as it comes: nothing may depend on it, and services exist that keep none.

    Args:
        store: any.
        most: entries of one listing.
    """

    def __init__(self, store: ObjectStore, most: int = MAX_LISTED) -> None:
        self._store = store
        self._most = most
        self.put, self.get, self.delete = store.put, store.get, store.delete

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list.

        Raises:
            StoreError: the listing broke off, or did not end within `most` entries.
        """
        given: set[str] = set()
        count = 0
        async for info in self._store.list(prefix, after=after):
            count += 1
            if count > self._most:
                raise StoreError(
                    f"{prefix}: the listing has more than {self._most} entries; who writes there writes too much, "
                    "or the storage does not end it"
                )
            if info.path.startswith(prefix) and info.path > after and info.path not in given:
                given.add(info.path)
                yield info
