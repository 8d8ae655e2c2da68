"""Restricts a store to the objects below a prefix."""

from collections.abc import AsyncIterator

from grailnode.store.checks import check_path, check_prefix
from roles.ports import ObjectInfo, ObjectStore


class PrefixedStore:
    """Implements ObjectStore with the objects below `prefix`, which it adds to every path.

    Args:
        prefix: ends with '/'.

    Raises:
        ValueError: `prefix` is not a prefix of object paths, or does not end with '/'.
    """

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        if not check_prefix(prefix).endswith("/"):
            raise ValueError(f"a store's prefix ends with '/': {prefix!r}")
        self._store = store
        self._prefix = prefix

    async def put(self, path: str, data: bytes) -> None:
        await self._store.put(self._prefix + check_path(path), data)

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        return await self._store.get(self._prefix + check_path(path), max_bytes, offset=offset, size=size)

    async def delete(self, path: str) -> None:
        await self._store.delete(self._prefix + check_path(path))

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        start = self._prefix + after if after else ""
        async for info in self._store.list(self._prefix + check_prefix(prefix), after=start):
            if info.path.startswith(self._prefix):
                yield ObjectInfo(info.path.removeprefix(self._prefix), info.size)
