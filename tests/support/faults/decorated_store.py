"""A store that passes everything on, for tests in which one operation differs."""

from collections.abc import AsyncIterator, Sequence

import trio

from roles.ports import ObjectInfo, ObjectStore, StoreError


class DecoratedStore:
    """Passes every operation on to a store. Subclasses override what differs."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner

    async def before(self, operation: str, path: str) -> None:
        """Do nothing before an operation ('put', 'get', 'list' or 'delete'). Subclasses may wait, or refuse it."""

    async def put(self, path: str, data: bytes) -> None:
        await self.before("put", path)
        await self.inner.put(path, data)

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        await self.before("get", path)
        return await self.inner.get(path, max_bytes, offset=offset, size=size)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        await self.before("list", prefix)
        async for info in self.inner.list(prefix, after=after):
            yield info

    async def delete(self, path: str) -> None:
        await self.before("delete", path)
        await self.inner.delete(path)


class UnreachableStore(DecoratedStore):
    """A store in which operations on objects below some prefixes fail while it is away.

    Args:
        operations: those that fail.
        seconds: until one fails.
        is_away: whether it is away from the beginning.

    Attributes:
        refusals: how many operations have failed.
    """

    def __init__(
        self,
        inner: ObjectStore,
        *prefixes: str,
        operations: Sequence[str] = ("get",),
        seconds: float = 1.0,
        is_away: bool = True,
    ) -> None:
        super().__init__(inner)
        self.prefixes = prefixes
        self.operations = operations
        self.seconds = seconds
        self.is_away = is_away
        self.refusals = 0

    async def before(self, operation: str, path: str) -> None:
        if self.is_away and operation in self.operations and path.startswith(self.prefixes):
            self.refusals += 1
            await trio.sleep(self.seconds)
            raise StoreError(f"{path}: connection refused")
