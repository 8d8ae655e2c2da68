"""Limits on what one node asks of a store: operations at a time, operations per second, bytes per object."""

import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

import trio

from roles.ports import ObjectInfo, ObjectStore, TooLargeError

PAGE: Final = 1000
"""Listed objects that count as one request."""


@dataclass(frozen=True)
class RequestLimits:
    """What a store may be asked for.

    Attributes:
        concurrency: operations at a time.
        rate: operations per second in the long run; burst: those that may come at once after a rest.
        max_put_bytes, max_get_bytes: bytes of one object, or of one answer.
    """

    concurrency: int
    rate: float
    burst: int
    max_put_bytes: int
    max_get_bytes: int


class LimitedStore:
    """Lets operations wait until the limits allow them, in the order they came; refuses what is too large."""

    def __init__(self, store: ObjectStore, limits: RequestLimits) -> None:
        self._store = store
        self._limits = limits
        self._slots = trio.CapacityLimiter(limits.concurrency)
        self._turns = _Turns(limits.rate, limits.burst)

    async def put(self, path: str, data: bytes) -> None:
        """Implements ObjectStore.put.

        Raises:
            TooLargeError: larger than this node may store.
        """
        if len(data) > self._limits.max_put_bytes:
            raise TooLargeError(f"{path}: {len(data)} bytes where at most {self._limits.max_put_bytes} may be stored")
        await self._turns.wait()
        async with self._slots:
            await self._store.put(path, data)

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        """Implements ObjectStore.get."""
        await self._turns.wait()
        async with self._slots:
            return await self._store.get(path, min(max_bytes, self._limits.max_get_bytes), offset=offset, size=size)

    async def delete(self, path: str) -> None:
        """Implements ObjectStore.delete."""
        await self._turns.wait()
        async with self._slots:
            await self._store.delete(path)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list; holds a slot while it waits for the store, not while its reader works."""
        source = self._store.list(prefix, after=after)
        count = 0
        while True:
            if count % PAGE == 0:
                await self._turns.wait()
            async with self._slots:
                info = await anext(source, None)
            if info is None:
                return
            count += 1
            yield info


class _Turns:
    """A token bucket in the form of the next moment that is free (GCRA): no background task, first come first served."""

    def __init__(self, rate: float, burst: int) -> None:
        self._interval = 1.0 / rate
        self._credit = (burst - 1) / rate
        self._free = -math.inf

    async def wait(self) -> None:
        now = trio.current_time()
        turn = max(self._free, now - self._credit)
        self._free = turn + self._interval
        await trio.sleep(max(0.0, turn - now))
