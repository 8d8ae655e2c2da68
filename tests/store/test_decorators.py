"""Decorators of stores on a clock that jumps: retries, limits, meters and bounded listings."""

import random

import pytest
import trio
import trio.testing

from grailnode.store.checks import PermanentError
from grailnode.store.decorators.limiting import BoundedStore, LimitedStore, MeteredStore
from grailnode.store.decorators.retrying import RetryingStore, RetryPolicy
from grailnode.store.https.https_store import HttpsStore, open_client
from grailnode.store.memory import MemoryStore
from roles.node.retries import Pause
from roles.ports import NotFoundError, StoreError, TooLargeError
from tests.support.faults.faulty_store import Fault, FaultyStore, Link
from tests.support.measuring.store_listing import paths
from tests.support.measuring.store_tally import Tally, TallyMeter


@pytest.fixture
def faulty(memory: MemoryStore) -> FaultyStore:
    return FaultyStore(memory, random.Random(7))


@pytest.fixture
def retrying(faulty: FaultyStore) -> RetryingStore:
    return RetryingStore(faulty, random.Random(8), RetryPolicy(attempts=4, pause=Pause(1.0, 10.0), deadline=60.0))


class TestRetrying:
    async def test_pauses_double_and_are_jittered(self, faulty, retrying, autojump_clock):
        for _ in range(3):
            faulty.plan("put", Fault.ERROR)
        await retrying.put("a", b"x")
        assert 3.5 <= trio.current_time() <= 7.0  # 1 + 2 + 4 seconds, each cut to 50 to 100 percent

    async def test_a_permanent_failure_is_raised_with_its_cause(self, faulty, retrying, autojump_clock):
        faulty.link = Link.NO_REQUESTS
        with pytest.raises(StoreError, match=r"a: no connection.*\(tried 4 times\)") as error_info:
            await retrying.put("a", b"x")
        assert isinstance(error_info.value.__cause__, StoreError)

    async def test_a_hanging_store_ends_at_the_deadline(self, faulty, retrying, autojump_clock):
        faulty.plan("get", Fault.HANG)
        with pytest.raises(StoreError, match="no answer within 60 s"):
            await retrying.get("a", 1)
        assert trio.current_time() == pytest.approx(60.0)

    async def test_final_errors_are_not_retried(self, memory, faulty, retrying, autojump_clock):
        await memory.put("a", b"long")
        with pytest.raises(NotFoundError):
            await retrying.get("b", 1)
        with pytest.raises(TooLargeError):
            await retrying.get("a", 1)
        with pytest.raises(PermanentError):
            async with open_client() as client:
                await RetryingStore(HttpsStore("https://bucket.invalid", client), random.Random(1)).put("a", b"")
        assert trio.current_time() == 0.0

    async def test_a_listing_continues_after_a_failure(self, memory, faulty, retrying, autojump_clock):
        expected_paths = [f"x/{number:02}" for number in range(40)]
        for path in expected_paths:
            await memory.put(path, b"")
        for _ in range(3):
            faulty.plan("list", Fault.LIST_BROKEN)
        assert await paths(retrying, "x/") == expected_paths
        assert len(faulty.trace) == 3


class TestLimited:
    async def test_requests_beyond_the_burst_are_delayed(self, memory, autojump_clock):
        store = LimitedStore(memory, concurrency=10, rate=2.0, burst=3, max_bytes=10)
        times = []
        for _ in range(6):
            await store.put("a", b"x")
            times.append(trio.current_time())
        assert times == pytest.approx([0, 0, 0, 0.5, 1.0, 1.5])
        await trio.sleep(100)
        for _ in range(4):
            await store.delete("a")
        assert trio.current_time() == pytest.approx(102.0)

    def test_another_event_loop_does_not_wait_for_the_times_of_the_last_one(self, memory):
        store = LimitedStore(memory, concurrency=10, rate=1e6, burst=9, max_bytes=10)

        async def put(began: float) -> float:
            await trio.sleep(began)
            await store.put("a", b"x")
            return trio.current_time()

        for began in (500_000.0, 0.0):  # each trio.run counts from a random number
            clock = trio.testing.MockClock(autojump_threshold=0)
            assert trio.run(put, began, clock=clock) == pytest.approx(began)

    async def test_concurrent_operations_are_limited(self, autojump_clock):
        active = most = 0

        class CountingStore(MemoryStore):
            async def put(self, path: str, data: bytes) -> None:
                nonlocal active, most
                active += 1
                most = max(most, active)
                await trio.sleep(1.0)
                active -= 1

        store = LimitedStore(CountingStore(), concurrency=3, rate=1e6, burst=100, max_bytes=10)
        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(store.put, str(number), b"")
        assert most == 3

    async def test_objects_beyond_the_ceiling_are_refused(self, memory, autojump_clock):
        store = LimitedStore(memory, concurrency=1, rate=1e6, burst=9, max_bytes=4)
        with pytest.raises(TooLargeError):
            await store.put("a", b"12345")
        await memory.put("a", b"123456")
        with pytest.raises(TooLargeError):
            await store.get("a", 100)
        assert await store.get("a", 100, offset=2, size=2) == b"34"

    async def test_a_listing_releases_its_slot_while_its_reader_works(self, memory, autojump_clock):
        store = LimitedStore(memory, concurrency=1, rate=1e6, burst=99, max_bytes=4)
        for name in "abc":
            await store.put(name, b"")
        with trio.fail_after(1):
            async for info in store.list(""):
                await store.get(info.path, 1)


class TestMetered:
    async def test_operations_are_counted_by_outcome(self, memory, autojump_clock):
        faulty, meter = FaultyStore(memory, random.Random(1), delay=0.0), TallyMeter()
        store = MeteredStore(faulty, meter)
        await store.put("a", b"12345")
        await store.get("a", 9)
        await store.get("a", 9, offset=3)
        faulty.plan("get", Fault.ERROR)
        for ceiling in (9, 1):
            with pytest.raises(StoreError):
                await store.get("a", ceiling)
        with pytest.raises(NotFoundError):
            await store.get("b", 9)
        await store.delete("a")
        assert await paths(store, "") == []
        faulty.plan("delete", Fault.HANG)
        with trio.move_on_after(2.0):
            await store.delete("a")
        assert meter.tallies == {
            ("put", "ok"): Tally(1, 5, 0.0),
            ("get", "ok"): Tally(2, 7, 0.0),
            ("get", "error"): Tally(1, 0, 0.0),
            ("get", "too_large"): Tally(1, 0, 0.0),
            ("get", "missing"): Tally(1, 0, 0.0),
            ("delete", "ok"): Tally(1, 0, 0.0),
            ("list", "ok"): Tally(1, 0, 0.0),
            ("delete", "cancelled"): Tally(1, 0, 2.0),
        }


# BoundedStore: listings with duplicates or foreign paths, and listings that never end


async def filled(count: int) -> MemoryStore:
    store = MemoryStore()
    for number in range(count):
        await store.put(f"a/{number:03d}", b"x")
    return store


@pytest.mark.parametrize("fault", [Fault.LIST_TWICE, Fault.LIST_SHUFFLED])
async def test_duplicates_are_removed_and_nothing_is_lost(fault: Fault):
    faulty = FaultyStore(await filled(50), random.Random(1))
    faulty.plan("list", fault)
    assert sorted(await paths(BoundedStore(faulty), "a/")) == [f"a/{number:03d}" for number in range(50)]


async def test_an_endless_listing_ends_in_an_error_of_one_line():
    faulty = FaultyStore(await filled(5), random.Random(1))
    faulty.plan("list", Fault.LIST_ENDLESS)
    with pytest.raises(StoreError, match="more than 100 entries"):
        await paths(BoundedStore(faulty, 100), "a/")
    assert len(await paths(BoundedStore(faulty, 5), "a/")) == 5


async def test_foreign_paths_are_left_out():
    class UnfilteredStore(MemoryStore):
        async def list(self, prefix: str, *, after: str = ""):
            async for info in super().list("", after=""):
                yield info

    store = UnfilteredStore()
    for path in ("a/1", "a/2", "b/1"):
        await store.put(path, b"x")
    assert await paths(BoundedStore(store), "a/", after="a/1") == ["a/2"]
