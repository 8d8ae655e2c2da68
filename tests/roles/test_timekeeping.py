"""What a wrong clock may not do: be believed. On a virtual clock, by a beacon whose rounds are out when they are due."""

import trio
from trio.testing import MockClock

from grailnode.beacon.relays import StoreBeacon, publish_rounds
from grailnode.store.memory import MemoryStore
from roles.node.timekeeping import Timekeeper
from tests.support.simulation.network import BEACON_KEY, BEGIN, Log
from tests.support.simulation.stormy_network import WrongClock
from tests.support.simulation.trio_clock import TrioClock

CHAIN = BEACON_KEY.chain(1000, int(BEGIN * 1000))


class Place:
    """A true beacon, a clock that may be wrong, and whoever keeps time by both."""

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
            await scenario(Place(nursery))
            nursery.cancel_scope.cancel()

    trio.run(run, clock=MockClock(autojump_threshold=0))


def test_a_right_clock_is_believed_at_once():
    async def scenario(place: Place) -> None:
        await place.until(10.5)
        assert await place.time.wait_for_newest_round() == 11
        assert await place.time.proven_time() == BEGIN + 10.5
        assert await place.time.has_come(11) and not await place.time.has_come(12)
        assert place.log.events == []

    simulated(scenario)


def test_a_clock_that_is_ahead_waits_until_it_is_right_and_closes_nothing():
    async def scenario(place: Place) -> None:
        await place.until(10.5)
        place.clock.wrong = 3600.0
        assert not await place.time.has_come(100)
        with trio.move_on_after(20) as waiting:
            await place.time.wait_for_newest_round()
        assert waiting.cancelled_caught
        assert {name for name, _ in place.log.events} == {"beacon-late"}
        assert all("clock is ahead" in fields["error"] for _, fields in place.log.events)
        place.clock.wrong = 0.0
        await place.until(40.5)
        assert await place.time.wait_for_newest_round() == 41

    simulated(scenario)


def test_a_clock_that_was_set_back_signs_nothing_and_later_deadlines_are_still_over():
    async def scenario(place: Place) -> None:
        await place.until(10.5)
        await place.time.wait_for_newest_round()
        place.clock.wrong = -3600.0
        await place.until(30.5)
        assert place.time.now() >= BEGIN + 30.0  # since the newest round that was seen, so much time has passed
        with trio.move_on_after(20) as waiting:
            await place.time.wait_for_newest_round()
        assert waiting.cancelled_caught
        assert "set back by 36" in place.log.events[-1][1]["error"]
        place.clock.wrong = 0.0
        assert await place.time.wait_for_newest_round() == 51

    simulated(scenario)


def test_whoever_waits_for_a_round_of_a_wrong_clock_gives_up_at_once_when_it_is_right():
    async def scenario(place: Place) -> None:
        await place.until(10.5)
        place.clock.wrong = 3600.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(place.time.wait_for_newest_round)
            await trio.sleep(3)
            place.clock.wrong = 0.0
            with trio.fail_after(1):
                while nursery.child_tasks:
                    await trio.sleep(0.1)

    simulated(scenario)


def test_a_moment_has_not_come_because_a_clock_says_so():
    async def scenario(place: Place) -> None:
        await place.until(10.5)
        await place.time.wait_for_newest_round()
        place.clock.wrong = 3600.0
        await place.time.wait_for_round(31)
        assert place.right.now() >= BEGIN + 30.0
        place.clock.wrong = 0.0
        await place.time.wait_for_round(41)
        assert place.right.now() < BEGIN + 41.0

    simulated(scenario)


def test_a_moment_comes_without_the_beacon_for_a_process_that_has_lived_so_long():
    async def scenario(place: Place) -> None:
        await place.until(10.5)
        await place.time.wait_for_newest_round()
        away = Timekeeper(StoreBeacon(MemoryStore(), CHAIN, place.clock), CHAIN, place.clock, place.log)
        away.record_round(11)
        await away.wait_for_round(31)
        assert BEGIN + 30.0 <= place.right.now() < BEGIN + 33.0

    simulated(scenario)


def test_a_beacon_that_always_lags_is_followed_with_its_lag():
    async def scenario(place: Place) -> None:
        lagging = WrongClock(place.right)
        lagging.wrong = -20.0
        store = MemoryStore()
        time = Timekeeper(StoreBeacon(store, CHAIN, place.clock), CHAIN, place.clock, place.log)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: publish_rounds(BEACON_KEY, CHAIN, store, lagging, keep=100))
            await place.until(50.5)
            assert await time.wait_for_newest_round() == 51
            assert await time.proven_time() <= BEGIN + 100
            nursery.cancel_scope.cancel()

    simulated(scenario)


def test_a_round_that_the_node_signed_for_is_a_floor_across_a_restart():
    async def scenario(place: Place) -> None:
        await place.until(50.5)
        place.clock.wrong = -45.0
        place.time.record_round(40)
        with trio.move_on_after(3) as waiting:
            await place.time.wait_for_newest_round()
        assert waiting.cancelled_caught

    simulated(scenario)
