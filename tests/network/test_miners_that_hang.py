"""Miners whose spaces hang, before a validator and before a trainer: they wait for each other, and nobody waits for
them.
"""

import math
from dataclasses import replace

import pytest
import trio

from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.identity.signing import SigningKey
from protocol.judging.verdict import Reason
from roles.ports import StoreError
from roles.validator.case_queue import Reputation
from roles.validator.judging_scheduler import EngineSlot
from roles.validator.window_cases import read_window_cases
from tests.attacks.test_pledges import Bench
from tests.network.test_network import CHOICES, running, simulate, verdicts
from tests.network.test_spaces_that_fail import Unreachable
from tests.support.attacks.court import WINDOW
from tests.support.attacks.target import attack
from tests.support.builders.chains import MINER
from tests.support.simulation.network import Network, key

HANGS = 5.0  # a network's windows have 2 seconds


class Hanging(Unreachable):
    """A store in which what lies below some prefixes is answered late, and then not, from some moment (trio's time) on."""

    def __init__(self, inner: MemoryStore, *prefixes: str, since: float = 0.0, seconds: float = HANGS) -> None:
        super().__init__(inner, "")
        self._prefixes = prefixes
        self._seconds = seconds
        self.since = since

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if path.startswith(self._prefixes) and trio.current_time() >= self.since:
            await trio.sleep(self._seconds)
            raise StoreError(f"{path}: no answer")
        return await self._inner.get(path, max_bytes, offset=offset, size=size)


@attack
async def test_strangers_that_hang_do_not_make_an_honest_commitment_late():
    bench = Bench()
    await bench.commit()
    strangers = [SigningKey(number.to_bytes(32, "big")).public for number in range(1, 65)]
    spaces = Hanging(bench.store, *(stranger.hex() for stranger in strangers), seconds=60.0)
    validator = replace(bench.validator, store=spaces)
    await bench.clock.sleep_until(bench.run.deadline_time(WINDOW))
    found = await read_window_cases(validator, WINDOW, {MINER.public: 2, **dict.fromkeys(strangers, 1)})
    drawing = bench.run.beacon.round_time(bench.run.schedule.audit(WINDOW))
    assert [case.miner for case in found.cases] == [MINER.public]
    assert found.cases[0].read_time < drawing <= bench.clock.now() < drawing + 1.0
    assert found.undelivered == {}  # nobody knows what the others did


@pytest.mark.parametrize("known", [False, True], ids=["stranger", "known"])
def test_a_miner_whose_batches_hang_costs_the_others_nothing(known: bool):
    async def scenario() -> None:
        network = Network(CHOICES)
        hanging = Hanging(network.store, paths.kind_prefix(key("hanging").public, "batches"))
        network.medium = lambda name, process: hanging if name == "validator-0" else network.store  # type: ignore[method-assign]
        hanging.since = math.inf if known else 0.0
        async with running(network, miners=1) as nursery:
            nursery.start_soon(network.run_miner, "hanging", 2)
            if known:
                await network.until_window(6)
                hanging.since = trio.current_time()
            await network.until_window(16)
        honest = key("miner-1").public.hex()[:8]
        collected = [event for event in network.events("trainer/download", "collected") if event["miner"] == honest]
        assert len([event for event in collected if event["window"] >= 6 and event["used"]]) >= 6
        judged = await verdicts(network, "hanging", range(8, 12))
        assert {item.reason for verdict in judged.values() for item in verdict.judgements} == {Reason.MISSING}

    simulate(scenario)


class Stalling(Unreachable):
    """A store that does not answer the first look at each part of what lies below a prefix."""

    def __init__(self, inner: MemoryStore, prefix: str) -> None:
        super().__init__(inner, prefix)
        self.stalled: set[tuple[str, int]] = set()

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if path.startswith(self._prefix) and (path, offset) not in self.stalled:
            self.stalled.add((path, offset))
            await trio.sleep(60.0)
        return await self._inner.get(path, max_bytes, offset=offset, size=size)


def test_requests_that_hang_once_are_made_again_and_held_against_nobody():
    async def scenario() -> None:
        network = Network(CHOICES)
        stalling = Stalling(network.store, paths.kind_prefix(key("miner-1").public, "batches"))
        network.medium = lambda name, process: stalling if name == "validator-0" else network.store  # type: ignore[method-assign]
        async with running(network, miners=2):
            await network.until_window(8)
        judged = await verdicts(network, "miner-1", range(8))
        assert len(judged) >= 5 and stalling.stalled
        assert not any(item.reason for verdict in judged.values() for item in verdict.judgements)

    simulate(scenario)


def test_miners_that_hang_for_the_trainer_do_not_delay_an_honest_ones_groups():
    async def scenario() -> None:
        network = Network(CHOICES)
        names = [f"hanging-{number}" for number in range(6)]
        hanging = Hanging(network.store, *(paths.kind_prefix(key(name).public, "commitments") for name in names))
        network.medium = lambda name, process: hanging if process == "/download" else network.store  # type: ignore[method-assign]
        honest = key("miner-1").public.hex()[:8]
        after: dict[int, float] = {}  # seconds from a window's opening to when its groups were handed over
        async with running(network, miners=1) as nursery:
            for name in names:
                nursery.start_soon(network.run_miner, name, 1)
            await network.until_window(1)
            while network.node("x").window() < 20:
                await trio.sleep(0.25)
                for event in network.events("trainer/download", "collected"):
                    if event["miner"] == honest and event["used"]:
                        late = network.clock.now() - network.run.opening_time(event["window"])
                        after.setdefault(event["window"], late)
        assert len(after) >= 14
        assert max(after.values()) < 6.0

    simulate(scenario)


def test_a_link_that_fails_is_held_against_nobody():
    async def scenario() -> None:
        network = Network(CHOICES)
        lost = Hanging(network.store, paths.kind_prefix(key("miner-1").public, "batches"), since=math.inf)
        network.medium = lambda name, process: lost if name == "validator-0" else network.store  # type: ignore[method-assign]
        async with running(
            network, miners=1
        ):  # with nobody else whose storage could show that it is not the validator's link
            await network.until_window(6)
            lost.since = trio.current_time()
            await network.until_window(12)
        judged = await verdicts(network, "miner-1", range(12))
        assert not any(item.reason for verdict in judged.values() for item in verdict.judgements)
        told = [event["error"] for event in network.events("validator-0", "not-judged")]
        assert told and all("none from other storage" in error for error in told)

    simulate(scenario)


def test_the_desk_has_one_at_a_time_the_known_first_and_versions_together():
    order: list[tuple[Reputation, int]] = []

    async def use(desk: EngineSlot, standing: Reputation, version: int) -> None:
        async with desk.reserve(standing, version):
            order.append((standing, version))
            await trio.sleep(1.0)

    async def scenario() -> None:
        desk = EngineSlot()
        comers = [
            (Reputation.STRANGER, 4),
            (Reputation.STRANGER, 5),
            (Reputation.STRANGER, 4),
            (Reputation.REJECTED, 5),
        ]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(use, desk, Reputation.STRANGER, 4)
            await trio.sleep(0.1)
            for comer in comers:
                nursery.start_soon(use, desk, *comer)
            await trio.sleep(0.1)
            with trio.move_on_after(0.1):
                await use(desk, Reputation.KNOWN, 3)  # gives up
            nursery.start_soon(use, desk, Reputation.KNOWN, 5)
        assert trio.current_time() >= 6.0
        assert order == [
            (Reputation.STRANGER, 4),
            (Reputation.KNOWN, 5),
            (Reputation.STRANGER, 5),
            (Reputation.STRANGER, 4),
            (Reputation.STRANGER, 4),
            (Reputation.REJECTED, 5),
        ]
        async with (
            trio.open_nursery() as nursery
        ):  # whoever is cancelled while it is being given the place gives it back
            nursery.start_soon(use, desk, Reputation.STRANGER, 1)
            await trio.sleep(0.1)
            with trio.move_on_after(0.9):
                await use(desk, Reputation.KNOWN, 2)
            await use(desk, Reputation.STRANGER, 3)
        assert order[-1] == (Reputation.STRANGER, 3)

    simulate(scenario)
