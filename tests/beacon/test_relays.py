"""RelayBeacon with relays that are late, silent or false, and publishing a local chain, on a clock that jumps."""

import json
import logging
import random

import pytest
import trio

from grailnode.beacon.relays import Relay, RelayBeacon, RelayTimeouts, StoreBeacon, publish_rounds
from grailnode.store.memory import MemoryStore
from protocol.beacon import LocalKey, open_round
from roles.ports import BeaconError, StoreError
from tests.support.faults.decorated_store import DecoratedStore, SlowStore, UnreachableStore
from tests.support.faults.faulty_store import Fault, FaultyStore, Link
from tests.support.measuring.store_listing import paths
from tests.support.simulation.network import Log
from tests.support.simulation.recording_store import RecordingStore
from tests.support.simulation.virtual_clock import TrioClock, running

KEY = LocalKey.from_seed(b"a seed for tests alone")
EPOCH = 1_700_000_000
CHAIN = KEY.chain(250, EPOCH * 1000)
ROUNDS = range(1, 12)
TRUTH = [open_round(CHAIN, number, KEY.answer(number)) for number in ROUNDS]


@pytest.fixture
async def clock() -> TrioClock:
    """Return trio's clock, which jumps in tests. Round 1 is due when it starts."""
    return TrioClock(EPOCH)


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


HONEST = {number: KEY.answer(number) for number in ROUNDS}
LIAR = {number: json.dumps({"round": number, "signature": KEY.sign(number + 1).hex()}).encode() for number in ROUNDS}
OTHER_ROUND = {number: KEY.answer(number + 1) for number in ROUNDS}
GARBAGE = dict.fromkeys(ROUNDS, b"<html>sign in to the hotel's network</html>")
ENDLESS = dict.fromkeys(ROUNDS, bytes(1_000_000))


class TestRelays:
    async def test_a_round_is_not_returned_before_it_is_due(self, autojump_clock, clock):
        beacon = RelayBeacon([relay_of(HONEST)], CHAIN, clock)
        assert await beacon.randomness(9) == TRUTH[8]
        assert trio.current_time() == pytest.approx(2.0)

    @pytest.mark.parametrize(
        "bad", [LIAR, OTHER_ROUND, GARBAGE, ENDLESS, {}], ids=["liar", "other", "garbage", "endless", "empty"]
    )
    async def test_one_honest_relay_is_enough(self, autojump_clock, clock, bad):
        relays = [relay_of(bad), relay_of(bad), relay_of(HONEST)]
        assert await RelayBeacon(relays, CHAIN, clock).randomness(1) == TRUTH[0]
        assert trio.current_time() == pytest.approx(0.0)

    async def test_a_relay_that_lies_is_named_and_asked_last(self, autojump_clock, clock, caplog):
        beacon = RelayBeacon([relay_of(LIAR, "liar"), relay_of(HONEST, "honest")], CHAIN, clock)
        with caplog.at_level(logging.WARNING):
            for number in (1, 2, 3):
                assert await beacon.randomness(number) == TRUTH[number - 1]
        assert [record.getMessage().split()[2] for record in caplog.records] == ["liar"]

    async def test_a_relay_that_hangs_costs_its_head_start(self, autojump_clock, clock):
        beacon = RelayBeacon([silent_relay(), relay_of(HONEST)], CHAIN, clock)
        assert await beacon.randomness(1) == TRUTH[0]
        assert trio.current_time() == pytest.approx(RelayTimeouts().head_start)

    async def test_without_a_valid_answer_the_beacon_fails(self, autojump_clock, clock):
        cut = FaultyStore(MemoryStore(), random.Random(1))
        cut.link = Link.NO_REQUESTS
        relays = [relay_of(LIAR, "liar"), silent_relay(), Relay("cut", cut), relay_of({}, "empty")]
        beacon = RelayBeacon(relays, CHAIN, clock, timeouts=RelayTimeouts(deadline=30.0))
        with pytest.raises(BeaconError) as error_info:
            await beacon.randomness(5)
        assert trio.current_time() == pytest.approx(31.0)
        for cause in ("round 5", "liar: false answer", "silent: no answer", "cut: ", "empty: no such round"):
            assert cause in str(error_info.value)

    async def test_a_late_round_is_awaited(self, autojump_clock, clock, memory):
        beacon = StoreBeacon(memory, CHAIN, clock)
        answers: list[bytes] = []

        async def wait() -> None:
            answers.append(await beacon.randomness(1))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.sleep(20.0)
            assert answers == []
            await memory.put(CHAIN.path(1), KEY.answer(1))
        assert answers == [TRUTH[0]]
        assert trio.current_time() < 20.0 + 2 * RelayTimeouts().pause.longest

    async def test_a_verified_round_is_cached(self, autojump_clock, clock, memory):
        await memory.put(CHAIN.path(1), KEY.answer(1))
        beacon = StoreBeacon(memory, CHAIN, clock)
        assert await beacon.randomness(1) == TRUTH[0]
        await memory.delete(CHAIN.path(1))
        assert await beacon.randomness(1) == TRUTH[0]


def relay_of(answers: dict[int, bytes], name: str = "relay") -> Relay:
    """Return a relay that has answers from the beginning."""
    store = MemoryStore()
    store._objects = {CHAIN.path(number): answer for number, answer in answers.items()}
    store._paths = sorted(store._objects)
    return Relay(name, store)


def silent_relay() -> Relay:
    return Relay("silent", FaultyStore(MemoryStore(), random.Random(1), {Fault.HANG: 1.0}))


class TestPublishing:
    async def test_each_round_appears_when_it_is_due(self, autojump_clock, clock, memory, nursery):
        nursery.start_soon(lambda: publish_rounds(KEY, CHAIN, memory, clock, keep=100))
        beacon = StoreBeacon(memory, CHAIN, clock)
        for number in ROUNDS:
            assert await beacon.randomness(number) == TRUTH[number - 1]
            assert CHAIN.round_time(number) <= clock.now() <= CHAIN.round_time(number) + 0.1

    async def test_the_newest_round_appears_in_a_store_that_cannot_be_listed(self, autojump_clock, clock, memory):
        class Unlisted(DecoratedStore):
            async def before(self, operation: str, path: str) -> None:
                if operation == "list":
                    raise StoreError("no right to list")

        async with running(lambda: publish_rounds(KEY, CHAIN, Unlisted(memory), clock, keep=4)):
            await trio.sleep(0.6)
            assert await paths(memory, "")

    async def test_old_rounds_are_removed(self, autojump_clock, clock, memory, nursery):
        nursery.start_soon(lambda: publish_rounds(KEY, CHAIN, memory, clock, keep=4))
        await trio.sleep(5.1)
        assert sorted(await paths(memory, "")) == sorted(CHAIN.path(number) for number in (18, 19, 20, 21))

    async def test_after_a_restart_the_newest_rounds_are_published_first(self, autojump_clock, clock, memory):
        store = RecordingStore()
        async with running(lambda: publish_rounds(KEY, CHAIN, store, clock, keep=6)):
            await trio.sleep(1.1)
        await trio.sleep(1.0)
        async with running(lambda: publish_rounds(KEY, CHAIN, store, clock, keep=6)):
            await trio.sleep(0.05)
        assert [put.path for put in store.puts] == [CHAIN.path(number) for number in (1, 2, 3, 4, 5, 9, 8, 7, 6)]
        assert sorted(await paths(store, "")) == [CHAIN.path(number) for number in (4, 5, 6, 7, 8, 9)]

    async def test_nothing_is_published_before_genesis(self, autojump_clock, clock, memory, nursery):
        chain = KEY.chain(250, (EPOCH + 10) * 1000)
        nursery.start_soon(lambda: publish_rounds(KEY, chain, memory, clock, keep=4))
        await trio.sleep(9.9)
        assert await paths(memory, "") == []
        await trio.sleep(0.2)
        assert await paths(memory, "") == [chain.path(1)]

    async def test_a_failing_store_delays_rounds_but_loses_none(self, autojump_clock, clock, memory, nursery):
        rates = {Fault.ERROR: 0.2, Fault.LOST_ANSWER: 0.1, Fault.DELAY: 0.1, Fault.LIST_BROKEN: 0.3}
        faulty = FaultyStore(memory, random.Random(11), rates, delay=0.2)
        nursery.start_soon(lambda: publish_rounds(KEY, CHAIN, faulty, clock, keep=200))
        await trio.sleep(5.0)
        faulty.link = Link.NO_REQUESTS
        await trio.sleep(5.0)
        faulty.link = Link.OPEN
        beacon = StoreBeacon(faulty, CHAIN, clock)
        for number in range(1, 60):
            assert await beacon.randomness(number) == open_round(CHAIN, number, KEY.answer(number))
        assert faulty.trace

    async def test_storage_that_is_slow_or_refuses_is_reported(self, autojump_clock, clock, memory, nursery):
        slow_store, log = SlowStore(put_seconds=0.1), Log("beacon")
        store = UnreachableStore(slow_store, "", operations=("put",), seconds=9.0, is_away=False)
        nursery.start_soon(lambda: publish_rounds(KEY, CHAIN, store, clock, keep=4, telemetry=log))
        await trio.sleep(2.0)
        assert log.events == []
        slow_store.put_seconds = 3.0
        await trio.sleep(4.0)
        assert "storage took 3.0 s, where a round lasts 0.25 s" in log.named("round-late")[0]["error"]
        store.is_away = True
        await trio.sleep(20.0)
        assert log.named("round-unpublished")[0]["error"].endswith("refused")

    async def test_objects_with_other_names_are_not_removed(self, autojump_clock, clock, memory, nursery):
        foreign = [f"{CHAIN.rounds_prefix}{name}" for name in ("latest", "007", "-3", "٣", "1" * 60, "1.json")]
        for path in foreign:
            await memory.put(path, b"")
        nursery.start_soon(lambda: publish_rounds(KEY, CHAIN, memory, clock, keep=2))
        await trio.sleep(5.0)
        assert set(foreign) < set(await paths(memory, ""))

    async def test_a_key_of_another_chain_raises_a_value_error(self, autojump_clock, clock, memory):
        other = LocalKey.from_seed(b"another seed, for tests")
        with pytest.raises(ValueError, match="does not sign"):
            await publish_rounds(other, CHAIN, memory, clock, keep=4)
        with pytest.raises(ValueError, match="at least"):
            await publish_rounds(KEY, CHAIN, memory, clock, keep=1)
