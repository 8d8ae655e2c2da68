"""A store that ends the process which uses it at an operation chosen beforehand."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from roles.ports import ObjectInfo, ObjectStore


@dataclass
class CrashTrigger:
    """Ends a process at one of its operations on stores.

    Attributes:
        matches: (operation, path) -> whether the operation counts; operations are 'put', 'get', 'list' and 'delete'.
        remaining: counting operations before the crash.
        after: whether to crash after the operation takes effect, and not before.
        crash: ends the process, and never returns.
    """

    matches: Callable[[str, str], bool]
    remaining: int
    after: bool
    crash: Callable[[], Awaitable[None]]

    def fires(self, operation: str, path: str) -> bool:
        """Count an operation, and return whether the process crashes at it."""
        if not self.matches(operation, path):
            return False
        self.remaining -= 1
        return self.remaining == -1


class CrashingStore:
    """Decorates a store with a crash trigger, which several stores of a process may share."""

    def __init__(self, store: ObjectStore, trigger: CrashTrigger) -> None:
        self._store = store
        self._trigger = trigger

    async def put(self, path: str, data: bytes) -> None:
        await self._around("put", path, lambda: self._store.put(path, data))

    async def delete(self, path: str) -> None:
        await self._around("delete", path, lambda: self._store.delete(path))

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        """Implements ObjectStore.get; a crash is always before the read."""
        if self._trigger.fires("get", path):
            await self._trigger.crash()
        return await self._store.get(path, max_bytes, offset=offset, size=size)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list; a crash is always before the first page."""
        if self._trigger.fires("list", prefix):
            await self._trigger.crash()
        async for info in self._store.list(prefix, after=after):
            yield info

    async def _around(self, operation: str, path: str, run_operation: Callable[[], Awaitable[None]]) -> None:
        fires = self._trigger.fires(operation, path)
        if fires and not self._trigger.after:
            await self._trigger.crash()
        await run_operation()
        if fires:
            await self._trigger.crash()
