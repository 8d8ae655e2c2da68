"""Refuses writes to a store."""

from collections.abc import AsyncIterator

from grailnode.store.permanent_error import PermanentError
from roles.ports import ObjectInfo, ObjectStore


class ReadOnlyStore:
    """Decorates a store: reads pass, writes raise an error without reaching it."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def put(self, path: str, data: bytes) -> None:
        """Always raises PermanentError."""
        raise PermanentError(f"{path}: not stored, this store is opened for reading")

    async def delete(self, path: str) -> None:
        """Always raises PermanentError."""
        raise PermanentError(f"{path}: not deleted, this store is opened for reading")

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        return await self._store.get(path, max_bytes, offset=offset, size=size)

    def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        return self._store.list(prefix, after=after)
