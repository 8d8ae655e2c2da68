"""What decorators that repeat failed operations of a store have in common."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from roles.ports import ObjectInfo, ObjectStore, StoreError

T = TypeVar("T")


class RepeatingStore(ABC):
    """Decorates a store: repeats operations that fail, as `_repeat` decides.

    That is safe, because ObjectStore's operations are idempotent.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def put(self, path: str, data: bytes) -> None:
        await self._repeat(path, lambda: self._store.put(path, data))

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        return await self._repeat(path, lambda: self._store.get(path, max_bytes, offset=offset, size=size))

    async def delete(self, path: str) -> None:
        await self._repeat(path, lambda: self._store.delete(path))

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list; a listing that fails continues after the last path it yielded."""
        source = self._store.list(prefix, after=after)
        last_path, needs_restart = after, False

        async def step() -> ObjectInfo | None:
            nonlocal source, needs_restart
            if needs_restart:
                source, needs_restart = self._store.list(prefix, after=last_path), False
            try:
                return await anext(source, None)
            except StoreError:
                needs_restart = True  # an iterator that has raised yields nothing more
                raise

        while (info := await self._repeat(prefix, step)) is not None:
            last_path = max(last_path, info.path)
            yield info

    @abstractmethod
    async def _repeat(self, where: str, action: Callable[[], Awaitable[T]]) -> T:
        """Do an operation, or one step of a listing, until it succeeds or is given up.

        Args:
            where: path or prefix, for messages.

        Raises:
            StoreError: it was given up.
        """
