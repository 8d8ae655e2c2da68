"""A node whose clock is wrong signs nothing, on a virtual clock and with a beacon whose rounds are out when due."""

import trio
from trio.testing import MockClock

from grailnode.beacon.relays import StoreBeacon, publish_rounds
from grailnode.store.memory import MemoryStore
from roles.node.timekeeping import Timekeeper
from tests.support.simulation.network import BEACON_KEY, BEGIN, Log
from tests.support.simulation.stormy_network import WrongClock
from tests.support.simulation.trio_clock import TrioClock

CHAIN = BEACON_KEY.chain(1000, int(BEGIN * 1000))


class Site:
    """An honest beacon, a clock that may be wrong, and a timekeeper that uses both."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.right = TrioClock(BEGIN)
        self.clock = WrongClock(self.right)
        self.store, self.log = MemoryStore(), Log("node")
        self.time = Timekeeper(StoreBeacon(self.store, CHAIN, self.clock), CHAIN, self.clock, self.log)
        nursery.start_soon(lambda: publish_rounds(BEACON_KEY, CHAIN, self.store, self.right, keep=100))

    async def until(self, second: float) -> None:
        await self.right.sleep_until(BEGIN + second)


def simulated(scenario) -> None:
    async def run() -> None:
        async with trio.open_nursery() as nursery:
            await scenario(Site(nursery))
            nursery.cancel_scope.cancel()

    trio.run(run, clock=MockClock(autojump_threshold=0))


def test_a_right_clock_is_proven_at_once():
    async def scenario(site: Site) -> None:
        await site.until(10.5)
        assert await site.time.wait_for_newest_round() == 11
        assert await site.time.proven_time() == BEGIN + 10.5
        assert await site.time.has_come(11) and not await site.time.has_come(12)
        assert site.log.events == []

    simulated(scenario)


def test_a_clock_that_is_ahead_proves_nothing_until_it_is_right():
    async def scenario(site: Site) -> None:
        await site.until(10.5)
        site.clock.wrong = 3600.0
        assert not await site.time.has_come(100)
        with trio.move_on_after(20) as scope:
            await site.time.wait_for_newest_round()
        assert scope.cancelled_caught
        assert {name for name, _ in site.log.events} == {"beacon-late"}
        assert all("clock is ahead" in fields["error"] for _, fields in site.log.events)
        site.clock.wrong = 0.0
        await site.until(40.5)
        assert await site.time.wait_for_newest_round() == 41

    simulated(scenario)


def test_a_clock_that_was_set_back_proves_nothing_and_past_deadlines_stay_past():
    async def scenario(site: Site) -> None:
        await site.until(10.5)
        await site.time.wait_for_newest_round()
        site.clock.wrong = -3600.0
        await site.until(30.5)
        assert site.time.now() >= BEGIN + 30.0  # since the newest round that was seen, so much time has passed
        with trio.move_on_after(20) as scope:
            await site.time.wait_for_newest_round()
        assert scope.cancelled_caught
        assert "set back by 36" in site.log.events[-1][1]["error"]
        site.clock.wrong = 0.0
        assert await site.time.wait_for_newest_round() == 51

    simulated(scenario)


def test_a_wait_for_a_round_of_a_wrong_clock_ends_when_the_clock_is_right():
    async def scenario(site: Site) -> None:
        await site.until(10.5)
        site.clock.wrong = 3600.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(site.time.wait_for_newest_round)
            await trio.sleep(3)
            site.clock.wrong = 0.0
            with trio.fail_after(1):
                while nursery.child_tasks:
                    await trio.sleep(0.1)

    simulated(scenario)


def test_a_clock_alone_does_not_end_the_wait_for_a_round():
    async def scenario(site: Site) -> None:
        await site.until(10.5)
        await site.time.wait_for_newest_round()
        site.clock.wrong = 3600.0
        await site.time.wait_for_round(31)
        assert site.right.now() >= BEGIN + 30.0
        site.clock.wrong = 0.0
        await site.time.wait_for_round(41)
        assert site.right.now() < BEGIN + 41.0

    simulated(scenario)


def test_the_wait_for_a_round_ends_without_the_beacon_after_that_much_process_time():
    async def scenario(site: Site) -> None:
        await site.until(10.5)
        await site.time.wait_for_newest_round()
        offline = Timekeeper(StoreBeacon(MemoryStore(), CHAIN, site.clock), CHAIN, site.clock, site.log)
        offline.record_round(11)
        await offline.wait_for_round(31)
        assert BEGIN + 30.0 <= site.right.now() < BEGIN + 33.0

    simulated(scenario)


def test_a_beacon_that_always_lags_is_used_with_its_lag():
    async def scenario(site: Site) -> None:
        lagging = WrongClock(site.right)
        lagging.wrong = -20.0
        store = MemoryStore()
        time = Timekeeper(StoreBeacon(store, CHAIN, site.clock), CHAIN, site.clock, site.log)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: publish_rounds(BEACON_KEY, CHAIN, store, lagging, keep=100))
            await site.until(50.5)
            assert await time.wait_for_newest_round() == 51
            assert await time.proven_time() <= BEGIN + 100
            nursery.cancel_scope.cancel()

    simulated(scenario)


def test_a_round_that_the_node_has_signed_bounds_the_time_after_a_restart():
    async def scenario(site: Site) -> None:
        await site.until(50.5)
        site.clock.wrong = -45.0
        site.time.record_round(40)
        with trio.move_on_after(3) as scope:
            await site.time.wait_for_newest_round()
        assert scope.cancelled_caught

    simulated(scenario)
