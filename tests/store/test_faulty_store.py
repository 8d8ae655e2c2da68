"""The faults that tests inject into stores and connections: they are those that were chosen, and nodes survive each."""

import random
from contextlib import nullcontext

import pytest
import trio
import trio.testing

from grailnode.store.memory import MemoryStore
from roles.ports import NotFoundError, ObjectStore, StoreError
from tests.store.s3_buckets import Bucket
from tests.support.faults.faulty_store import Fault, FaultyStore, Link
from tests.support.faults.http_scenarios import HTTP_FAULTS, HttpOutcome, run_http_scenario
from tests.support.measuring.store_listing import paths


@pytest.fixture
def faulty(memory: MemoryStore) -> FaultyStore:
    return FaultyStore(memory, random.Random(3), delay=10.0)


async def read(store: ObjectStore, path: str) -> bytes | None:
    try:
        return await store.get(path, 1000)
    except NotFoundError:
        return None


@pytest.mark.parametrize(
    ("fault", "raises", "expected"),
    [
        (Fault.ERROR, True, None),
        (Fault.LOST_ANSWER, True, b"x"),
        (Fault.LOST_WRITE, False, None),
        (Fault.DELAY, False, b"x"),
        (Link.NO_REQUESTS, True, None),
        (Link.NO_ANSWERS, True, b"x"),
    ],
)
async def test_faults_of_puts_and_cut_links(memory, faulty, fault, raises, expected, autojump_clock):
    if isinstance(fault, Link):
        faulty.link = fault
    else:
        faulty.plan("put", fault)
    with pytest.raises(StoreError) if raises else nullcontext():
        await faulty.put("a", b"x")
    assert await read(memory, "a") == expected
    assert (trio.current_time() > 0) == (fault is Fault.DELAY or isinstance(fault, Link))
    if isinstance(fault, Link):
        with pytest.raises(StoreError):
            await faulty.get("a", 1)
        faulty.link = Link.OPEN
        assert await read(faulty, "a") == expected


async def test_faults_of_reads(faulty):
    data = bytes(range(200))
    await faulty.put("a", b"before")
    await faulty.put("a", data)
    await faulty.put("b", b"of b")
    answers = {}
    for fault in [Fault.TRUNCATION, Fault.EXTRA_BYTES, Fault.BIT_FLIP, Fault.STALE, Fault.MISSING, Fault.WRONG_OBJECT]:
        faulty.plan("get", fault)
        answers[fault] = await read(faulty, "a")
    short, long, bit_flip = (answers[fault] for fault in (Fault.TRUNCATION, Fault.EXTRA_BYTES, Fault.BIT_FLIP))
    assert short is not None and len(short) < 200 and data.startswith(short)
    assert long is not None and len(long) > 200 and long.startswith(data)
    assert bit_flip is not None
    assert (int.from_bytes(bit_flip) ^ int.from_bytes(data)).bit_count() == 1
    assert answers[Fault.STALE] == b"before"
    assert answers[Fault.MISSING] is None
    assert answers[Fault.WRONG_OBJECT] in {data, b"of b"}
    assert await read(faulty, "a") == data


async def test_faults_of_listings(memory, faulty):
    old = [f"x/{number:02}" for number in range(30)]
    for path in old:
        await memory.put(path, b"")
    await faulty.put("x/new", b"")
    whole = [*old, "x/new"]
    answers = {}
    for fault in [Fault.LIST_STALE, Fault.LIST_GAPS, Fault.LIST_TWICE, Fault.LIST_SHUFFLED]:
        faulty.plan("list", fault)
        answers[fault] = await paths(faulty, "x/")
    assert answers[Fault.LIST_STALE] == old
    assert set(answers[Fault.LIST_GAPS]) < set(whole)
    assert set(answers[Fault.LIST_TWICE]) == set(whole) and len(answers[Fault.LIST_TWICE]) > len(whole)
    assert answers[Fault.LIST_SHUFFLED] != whole == sorted(answers[Fault.LIST_SHUFFLED])
    faulty.plan("list", Fault.LIST_BROKEN)
    with pytest.raises(StoreError):
        await paths(faulty, "x/")
    faulty.plan("list", Fault.LIST_ENDLESS)
    count = 0
    async for _ in faulty.list("x/"):
        count += 1
        if count > 1000:
            break
    assert count > 1000


# Every fault of HTTP and S3, each alone, between a node's stores and a real service. `bench.faults` runs pairs.


@pytest.mark.slow
async def test_nothing_is_lost_under_any_http_fault(rclone_bucket: Bucket):
    outcomes: dict[str, HttpOutcome] = {}
    slots = trio.CapacityLimiter(6)

    async def run(name: str) -> None:
        async with slots:
            outcomes[name] = await run_http_scenario(*rclone_bucket, (name,))

    async with trio.open_nursery() as nursery:
        for name in HTTP_FAULTS:
            nursery.start_soon(run, name)
    assert {name: outcome.violations for name, outcome in outcomes.items() if outcome.violations} == {}
    assert [name for name, outcome in outcomes.items() if not outcome.fault_count] == []
