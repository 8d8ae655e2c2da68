"""A store that ends the process which uses it at an operation chosen beforehand."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from roles.ports import ObjectStore
from tests.support.faults.decorated_store import DecoratedStore


@dataclass
class CrashTrigger:
    """Ends a process at one of its operations on stores.

    Attributes:
        matches: (operation, path) -> whether the operation counts; operations are 'put', 'get', 'list' and 'delete'.
        remaining: counting operations before the crash.
        after: whether to crash after the operation takes effect, and not before.
        crash: ends the process, and never returns; it may be set later.
    """

    matches: Callable[[str, str], bool]
    remaining: int
    after: bool
    crash: Callable[[], Awaitable[None]] = trio.sleep_forever

    @property
    def has_fired(self) -> bool:
        """Whether the process has crashed."""
        return self.remaining < 0

    def fires(self, operation: str, path: str) -> bool:
        """Count an operation, and return whether the process crashes at it."""
        if not self.matches(operation, path):
            return False
        self.remaining -= 1
        return self.remaining == -1


def changes(operation: str, path: str) -> bool:
    """Match every operation that changes something."""
    return operation in ("put", "delete")


def cancelling(scope: trio.CancelScope) -> Callable[[], Awaitable[None]]:
    """Return a crash that cancels the scope in which the process runs."""

    async def crash() -> None:
        scope.cancel()
        await trio.sleep_forever()

    return crash


class CrashingStore(DecoratedStore):
    """Decorates a store with a crash trigger, which several stores of a process may share. A crash at a read is always
    before it.
    """

    def __init__(self, store: ObjectStore, trigger: CrashTrigger) -> None:
        super().__init__(store)
        self._trigger = trigger

    async def before(self, operation: str, path: str) -> None:
        if operation in ("get", "list") and self._trigger.fires(operation, path):
            await self._trigger.crash()

    async def put(self, path: str, data: bytes) -> None:
        await self._around("put", path, lambda: self.inner.put(path, data))

    async def delete(self, path: str) -> None:
        await self._around("delete", path, lambda: self.inner.delete(path))

    async def _around(self, operation: str, path: str, run_operation: Callable[[], Awaitable[None]]) -> None:
        fires = self._trigger.fires(operation, path)
        if fires and not self._trigger.after:
            await self._trigger.crash()
        await run_operation()
        if fires:
            await self._trigger.crash()
