"""Measures the operations of a store: how many, with which outcome, how many bytes and how many seconds."""

from collections.abc import AsyncIterator, Awaitable
from typing import Protocol, TypeVar

import trio

from roles.ports import NotFoundError, ObjectInfo, ObjectStore, StoreError, TooLargeError

T = TypeVar("T")


class StoreMeter(Protocol):
    """Receives one record for every operation of a store."""

    def record(self, operation: str, outcome: str, payload_bytes: int, seconds: float) -> None:
        """Add one operation to the totals.

        Args:
            operation: 'put', 'get', 'list' or 'delete'.
            outcome: 'ok', 'missing', 'too_large', 'error' or 'cancelled'.
        """


class MeteredStore:
    """Records every operation of a store. A listing is one operation; its seconds are those its reader waited."""

    def __init__(self, store: ObjectStore, meter: StoreMeter) -> None:
        self._store = store
        self._meter = meter

    async def put(self, path: str, data: bytes) -> None:
        await self._measure("put", self._store.put(path, data), len(data))

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        return await self._measure("get", self._store.get(path, max_bytes, offset=offset, size=size))

    async def delete(self, path: str) -> None:
        await self._measure("delete", self._store.delete(path))

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        source = self._store.list(prefix, after=after)
        seconds, outcome = 0.0, "cancelled"
        try:
            while True:
                start = trio.current_time()
                try:
                    info = await anext(source, None)
                finally:
                    seconds += trio.current_time() - start
                if info is None:
                    outcome = "ok"
                    return
                yield info
        except StoreError as error:
            outcome = _outcome(error)
            raise
        finally:
            self._meter.record("list", outcome, 0, seconds)

    async def _measure(self, operation: str, work: Awaitable[T], payload_bytes: int = 0) -> T:
        outcome, start = "cancelled", trio.current_time()
        try:
            result = await work
            outcome = "ok"
            payload_bytes = len(result) if isinstance(result, bytes) else payload_bytes
            return result
        except StoreError as error:
            outcome = _outcome(error)
            raise
        finally:
            transferred_bytes = payload_bytes if outcome == "ok" else 0
            self._meter.record(operation, outcome, transferred_bytes, trio.current_time() - start)


def _outcome(error: StoreError) -> str:
    if isinstance(error, NotFoundError):
        return "missing"
    return "too_large" if isinstance(error, TooLargeError) else "error"
