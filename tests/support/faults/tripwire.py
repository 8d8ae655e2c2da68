"""A store that ends the process which uses it at an operation chosen beforehand."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from roles.ports import ObjectInfo, ObjectStore


@dataclass
class Tripwire:
    """When to strike.

    Attributes:
        matches: (operation, path) -> whether it counts; operations are 'put', 'get', 'list' and 'delete'.
        left: matching operations that pass unharmed.
        after: whether to strike once the operation took effect, instead of before.
        strike: ends the process; never returns.
    """

    matches: Callable[[str, str], bool]
    left: int
    after: bool
    strike: Callable[[], Awaitable[None]]

    def falls(self, operation: str, path: str) -> bool:
        """Count an operation; whether it is the one."""
        if not self.matches(operation, path):
            return False
        self.left -= 1
        return self.left == -1


class TrippingStore:
    """Decorates a store with a tripwire; several stores of a process may share one."""

    def __init__(self, store: ObjectStore, wire: Tripwire) -> None:
        self._store = store
        self._wire = wire

    async def put(self, path: str, data: bytes) -> None:
        """Implements ObjectStore.put."""
        await self._around("put", path, lambda: self._store.put(path, data))

    async def delete(self, path: str) -> None:
        """Implements ObjectStore.delete."""
        await self._around("delete", path, lambda: self._store.delete(path))

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        """Implements ObjectStore.get; struck before the read, whatever `after` says."""
        if self._wire.falls("get", path):
            await self._wire.strike()
        return await self._store.get(path, max_bytes, offset=offset, size=size)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list; struck before the first page, whatever `after` says."""
        if self._wire.falls("list", prefix):
            await self._wire.strike()
        async for info in self._store.list(prefix, after=after):
            yield info

    async def _around(self, operation: str, path: str, work: Callable[[], Awaitable[None]]) -> None:
        falls = self._wire.falls(operation, path)
        if falls and not self._wire.after:
            await self._wire.strike()
        await work()
        if falls:
            await self._wire.strike()
