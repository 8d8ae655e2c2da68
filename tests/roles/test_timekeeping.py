"""A node whose clock is wrong signs nothing, on a virtual clock and with a beacon whose rounds are out when due."""

from collections.abc import Awaitable, Callable

import trio

from grailnode.beacon.relays import StoreBeacon, publish_rounds
from grailnode.store.memory import MemoryStore
from roles.node.timekeeping import Timekeeper
from tests.support.simulation.faulty_network import WrongClock
from tests.support.simulation.network import BEACON_KEY, BEGIN, Log
from tests.support.simulation.virtual_clock import TrioClock, running, simulate

CHAIN = BEACON_KEY.chain(1000, int(BEGIN * 1000))


class ClockTestbed:
    """An honest beacon, a clock that may be wrong, and a timekeeper that uses both."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.right = TrioClock(BEGIN)
        self.clock = WrongClock(self.right)
        self.store, self.log = MemoryStore(), Log("node")
        self.time = Timekeeper(StoreBeacon(self.store, CHAIN, self.clock), CHAIN, self.clock, self.log)
        nursery.start_soon(lambda: publish_rounds(BEACON_KEY, CHAIN, self.store, self.right, keep=100))

    async def waits_in_vain(self, seconds: float) -> bool:
        """Return whether the wait for the newest round does not end within some seconds."""
        with trio.move_on_after(seconds) as scope:
            await self.time.wait_for_newest_round()
        return scope.cancelled_caught

    async def until(self, second: float) -> None:
        await self.right.sleep_until(BEGIN + second)


def simulated(test: Callable[[ClockTestbed], Awaitable[None]]) -> Callable[[], None]:
    """Run a test on a virtual clock with a testbed, from second 10.5 on."""

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            testbed = ClockTestbed(nursery)
            await testbed.until(10.5)
            await test(testbed)
            nursery.cancel_scope.cancel()

    return lambda: simulate(run)


@simulated
async def test_a_right_clock_is_proven_at_once(testbed: ClockTestbed) -> None:
    assert await testbed.time.wait_for_newest_round() == 11
    assert await testbed.time.proven_time() == BEGIN + 10.5
    assert await testbed.time.has_come(11) and not await testbed.time.has_come(12)
    assert testbed.log.events == []


@simulated
async def test_a_clock_that_is_ahead_proves_nothing_until_it_is_right(testbed: ClockTestbed) -> None:
    testbed.clock.error_seconds = 3600.0
    assert not await testbed.time.has_come(100)
    assert await testbed.waits_in_vain(20)
    (report,) = testbed.log.events
    assert report[0] == "beacon-late"
    assert report[1]["waits_for"] == "beacon"
    assert "clock is ahead" in report[1]["error"]
    testbed.clock.error_seconds = 0.0
    await testbed.until(40.5)
    assert await testbed.time.wait_for_newest_round() == 41
    assert [name for name, _ in testbed.log.events] == ["beacon-late", "waited"]


@simulated
async def test_a_clock_that_was_set_back_proves_nothing_and_past_deadlines_stay_past(testbed: ClockTestbed) -> None:
    await testbed.time.wait_for_newest_round()
    testbed.clock.error_seconds = -3600.0
    await testbed.until(30.5)
    assert testbed.time.now() >= BEGIN + 30.0  # since the newest round that was seen, so much time has passed
    assert await testbed.waits_in_vain(20)
    assert "set back by 36" in testbed.log.events[-1][1]["error"]
    testbed.clock.error_seconds = 0.0
    assert await testbed.time.wait_for_newest_round() == 51


@simulated
async def test_a_wait_for_a_round_of_a_wrong_clock_ends_when_the_clock_is_right(testbed: ClockTestbed) -> None:
    testbed.clock.error_seconds = 3600.0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(testbed.time.wait_for_newest_round)
        await trio.sleep(3)
        testbed.clock.error_seconds = 0.0
        with trio.fail_after(1):
            while nursery.child_tasks:
                await trio.sleep(0.1)


@simulated
async def test_a_clock_alone_does_not_end_the_wait_for_a_round(testbed: ClockTestbed) -> None:
    await testbed.time.wait_for_newest_round()
    testbed.clock.error_seconds = 3600.0
    await testbed.time.wait_for_round(31)
    assert testbed.right.now() >= BEGIN + 30.0
    testbed.clock.error_seconds = 0.0
    await testbed.time.wait_for_round(41)
    assert testbed.right.now() < BEGIN + 41.0


@simulated
async def test_the_wait_for_a_round_ends_without_the_beacon_after_that_much_process_time(testbed: ClockTestbed) -> None:
    await testbed.time.wait_for_newest_round()
    offline = Timekeeper(StoreBeacon(MemoryStore(), CHAIN, testbed.clock), CHAIN, testbed.clock, testbed.log)
    offline.record_round(11)
    await offline.wait_for_round(31)
    assert BEGIN + 30.0 <= testbed.right.now() < BEGIN + 33.0


@simulated
async def test_a_beacon_that_always_lags_is_used_with_its_lag(testbed: ClockTestbed) -> None:
    lagging = WrongClock(testbed.right)
    lagging.error_seconds = -20.0
    store = MemoryStore()
    time = Timekeeper(StoreBeacon(store, CHAIN, testbed.clock), CHAIN, testbed.clock, testbed.log)
    async with running(lambda: publish_rounds(BEACON_KEY, CHAIN, store, lagging, keep=100)):
        await testbed.until(50.5)
        assert await time.wait_for_newest_round() == 51
        assert await time.proven_time() <= BEGIN + 100


@simulated
async def test_a_round_that_the_node_has_signed_bounds_the_time_after_a_restart(testbed: ClockTestbed) -> None:
    await testbed.until(50.5)
    testbed.clock.error_seconds = -45.0
    testbed.time.record_round(40)
    assert await testbed.waits_in_vain(3)
