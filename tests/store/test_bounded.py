"""BoundedStore: listings with duplicates or foreign paths, and listings that never end."""

import random

import pytest

from grailnode.store.decorators.bounded import BoundedStore
from grailnode.store.memory import MemoryStore
from roles.ports import StoreError
from tests.support.faults.faulty_store import FaultyStore
from tests.support.faults.store_faults import Fault
from tests.support.simulation.virtual_clock import simulated


async def filled(count: int) -> MemoryStore:
    store = MemoryStore()
    for number in range(count):
        await store.put(f"a/{number:03d}", b"x")
    return store


async def list_paths(store: BoundedStore, prefix: str = "a/", after: str = "") -> list[str]:
    return [info.path async for info in store.list(prefix, after=after)]


@pytest.mark.parametrize("fault", [Fault.LIST_TWICE, Fault.LIST_SHUFFLED])
@simulated
async def test_duplicates_are_removed_and_nothing_is_lost(fault: Fault):
    faulty = FaultyStore(await filled(50), random.Random(1))
    faulty.plan("list", fault)
    paths = await list_paths(BoundedStore(faulty))
    assert sorted(paths) == [f"a/{number:03d}" for number in range(50)]


@simulated
async def test_an_endless_listing_ends_in_an_error_of_one_line():
    faulty = FaultyStore(await filled(5), random.Random(1))
    faulty.plan("list", Fault.LIST_ENDLESS)
    with pytest.raises(StoreError, match="more than 100 entries"):
        await list_paths(BoundedStore(faulty, 100))
    assert len(await list_paths(BoundedStore(faulty, 5))) == 5


@simulated
async def test_foreign_paths_are_left_out():
    class UnfilteredStore(MemoryStore):
        async def list(self, prefix: str, *, after: str = ""):
            async for info in super().list("", after=""):
                yield info

    store = UnfilteredStore()
    for path in ("a/1", "a/2", "b/1"):
        await store.put(path, b"x")
    assert await list_paths(BoundedStore(store), "a/", after="a/1") == ["a/2"]
