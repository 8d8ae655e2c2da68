"""A store below one prefix of which nothing can be read."""

from collections.abc import AsyncIterator

import trio

from grailnode.store.memory import MemoryStore
from roles.ports import ObjectInfo, StoreError


class UnreachableStore:
    """A store in which objects below one prefix cannot be read."""

    def __init__(self, inner: MemoryStore, prefix: str) -> None:
        self._inner = inner
        self._prefix = prefix

    async def put(self, path: str, data: bytes) -> None:
        await self._inner.put(path, data)

    async def delete(self, path: str) -> None:
        await self._inner.delete(path)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        async for info in self._inner.list(prefix, after=after):
            yield info

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if path.startswith(self._prefix):
            await trio.sleep(1.0)
            raise StoreError(f"{path}: connection refused")
        return await self._inner.get(path, max_bytes, offset=offset, size=size)
