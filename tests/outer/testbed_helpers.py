"""A store for one process of a testbed, and the check that all sites have the same states."""

from collections.abc import AsyncIterator

from roles.ports import ObjectInfo
from tests.support.simulation.outer_sites import OuterTestbed


class StoreOfATestbed:
    """The store of a testbed, for one process that reads something else."""

    def __init__(self, testbed: OuterTestbed) -> None:
        self._store = testbed.store

    async def put(self, path: str, data: bytes) -> None:
        await self._store.put(path, data)

    async def delete(self, path: str) -> None:
        await self._store.delete(path)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        async for info in self._store.list(prefix, after=after):
            yield info

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        return await self._store.get(path, max_bytes, offset=offset, size=size)


def equal_states(testbed: OuterTestbed, rounds: int) -> None:
    """Check that all sites applied the same states."""
    tables = [testbed.applied(name) for name in testbed.names]
    common = set.intersection(*(set(table) for table in tables))
    assert len(common) >= rounds
    assert all(len({table[number] for table in tables}) == 1 for number in common)
