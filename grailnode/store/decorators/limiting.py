"""Limits the load of one node on a store, the length of the listings that it believes and the paths that it uses; and
measures the operations: how many, with which outcome, how many bytes and how many seconds.
"""

import math
from collections.abc import AsyncIterator, Awaitable
from typing import Final, Protocol, TypeVar

import trio

from roles.ports import NotFoundError, ObjectInfo, ObjectStore, StoreError, TooLargeError

PAGE: Final = 1000
"""Entries of a listing that count as one request."""
MAX_ENTRIES: Final = 1 << 18
"""Entries of one listing, repeated ones included: twice MAX_PARTICIPANTS, some 20 MB of paths."""


class LimitedStore:
    """Delays operations until the limits allow them, first come, first served: a number at a time, operations per
    second in the long run, and those that may start at once after a pause. Refuses objects to store, and answers, of
    more than `max_bytes`.
    """

    def __init__(self, store: ObjectStore, *, concurrency: int, rate: float, burst: int, max_bytes: int) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._slots = trio.CapacityLimiter(concurrency)
        self._bucket = _TokenBucket(rate, burst)

    async def put(self, path: str, data: bytes) -> None:
        if len(data) > self._max_bytes:
            raise TooLargeError(f"{path}: {len(data)} bytes where at most {self._max_bytes} may be stored")
        await self._bucket.take()
        async with self._slots:
            await self._store.put(path, data)

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        await self._bucket.take()
        async with self._slots:
            return await self._store.get(path, min(max_bytes, self._max_bytes), offset=offset, size=size)

    async def delete(self, path: str) -> None:
        await self._bucket.take()
        async with self._slots:
            await self._store.delete(path)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list; it occupies a slot only while it waits for the store."""
        source = self._store.list(prefix, after=after)
        count = 0
        while True:
            if count % PAGE == 0:
                await self._bucket.take()
            async with self._slots:
                info = await anext(source, None)
            if info is None:
                return
            count += 1
            yield info


class _TokenBucket:
    """A token bucket that stores the time of its next token (GCRA), so that it needs no background task."""

    def __init__(self, rate: float, burst: int) -> None:
        self._interval = 1.0 / rate
        self._burst_seconds = (burst - 1) / rate
        self._next_time = -math.inf
        self._clock: trio.abc.Clock | None = None

    async def take(self) -> None:
        """Take a token; wait for it if there is none."""
        clock = trio.lowlevel.current_clock()
        if clock is not self._clock:  # the store was used in another trio.run, whose times have nothing to do with ours
            self._clock, self._next_time = clock, -math.inf
        now = trio.current_time()
        token_time = max(self._next_time, now - self._burst_seconds)
        self._next_time = token_time + self._interval
        await trio.sleep(max(0.0, token_time - now))


class BoundedStore:
    """Decorates a store whose listings may have duplicates or foreign paths, or may never end.

    The order stays as the store gives it: nothing may depend on it, and some services have none.
    """

    def __init__(self, store: ObjectStore, max_entries: int = MAX_ENTRIES) -> None:
        self._store = store
        self._max_entries = max_entries
        self.put, self.get, self.delete = store.put, store.get, store.delete

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        paths: set[str] = set()
        count = 0
        async for info in self._store.list(prefix, after=after):
            count += 1
            if count > self._max_entries:
                raise StoreError(
                    f"{prefix}: the listing has more than {self._max_entries} entries; a participant writes too many "
                    "objects there, or the storage repeats them without end"
                )
            if info.path.startswith(prefix) and info.path > after and info.path not in paths:
                paths.add(info.path)
                yield info


T = TypeVar("T")


class StoreMeter(Protocol):
    """Receives one record for every operation of a store."""

    def record(self, operation: str, outcome: str, payload_bytes: int, seconds: float) -> None:
        """Add a 'put', 'get', 'list' or 'delete' to the totals, whose outcome is 'ok', 'missing', 'too_large', 'error'
        or 'cancelled'.
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
