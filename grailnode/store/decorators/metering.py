"""Counts of what a store was asked for, by operation and outcome, for telemetry to show."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import trio

from roles.ports import NotFoundError, ObjectInfo, ObjectStore, StoreError, TooLargeError


@dataclass
class Tally:
    """Operations of one kind with one outcome: how many, payload bytes moved, seconds taken, in all."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass
class StoreMeter:
    """What one store was asked for so far.

    Attributes:
        tallies: by operation ('put', 'get', 'list', 'delete') and outcome ('ok', 'missing', 'too_large', 'error',
            'cancelled').
    """

    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)

    def add(self, operation: str, outcome: str, moved: int, seconds: float) -> None:
        """Count one operation that moved some bytes and took some seconds."""
        tally = self.tallies.setdefault((operation, outcome), Tally())
        tally.count += 1
        tally.bytes += moved
        tally.seconds += seconds


@dataclass
class _Measurement:
    """Bytes that the operation moved, set by it."""

    moved: int = 0


class MeteredStore:
    """Counts every operation of a store; a listing is one, and counts the seconds in which its reader waited."""

    def __init__(self, store: ObjectStore, meter: StoreMeter) -> None:
        self._store = store
        self._meter = meter

    async def put(self, path: str, data: bytes) -> None:
        """Implements ObjectStore.put."""
        with self._measured("put") as measurement:
            await self._store.put(path, data)
            measurement.moved = len(data)

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        """Implements ObjectStore.get."""
        with self._measured("get") as measurement:
            data = await self._store.get(path, max_bytes, offset=offset, size=size)
            measurement.moved = len(data)
            return data

    async def delete(self, path: str) -> None:
        """Implements ObjectStore.delete."""
        with self._measured("delete"):
            await self._store.delete(path)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list."""
        source = self._store.list(prefix, after=after)
        waited, outcome = 0.0, "cancelled"
        try:
            while True:
                start = trio.current_time()
                try:
                    info = await anext(source, None)
                finally:
                    waited += trio.current_time() - start
                if info is None:
                    outcome = "ok"
                    return
                yield info
        except StoreError as error:
            outcome = _outcome(error)
            raise
        finally:
            self._meter.add("list", outcome, 0, waited)

    @contextmanager
    def _measured(self, operation: str) -> Iterator[_Measurement]:
        measurement, outcome, start = _Measurement(), "cancelled", trio.current_time()
        try:
            yield measurement
            outcome = "ok"
        except StoreError as error:
            outcome = _outcome(error)
            raise
        finally:
            self._meter.add(operation, outcome, measurement.moved, trio.current_time() - start)


def _outcome(error: StoreError) -> str:
    if isinstance(error, NotFoundError):
        return "missing"
    return "too_large" if isinstance(error, TooLargeError) else "error"
