"""Miners whose spaces hang for a validator or for the trainer: they delay only each other."""

from dataclasses import replace

import pytest
import trio

from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.identity.signing import SigningKey
from protocol.judging.verdict import Reason
from roles.validator.case_queue import Reputation
from roles.validator.judging_scheduler import Slot
from roles.validator.window_cases import read_window_cases
from tests.support.attacked_nodes.trainer import WINDOW
from tests.support.attacked_nodes.validator import PLEDGE, AttackedValidator
from tests.support.builders.chains import MINER
from tests.support.faults.decorated_store import DecoratedStore, UnreachableStore
from tests.support.pytest_options.few_daily import few_daily
from tests.support.simulation.network import Network, key
from tests.support.simulation.network_runs import RULES, check_accepted, run_nodes, used_groups, verdicts

HANG_SECONDS = 5.0  # a network's windows have 2 seconds


async def test_strangers_that_hang_do_not_make_an_honest_commitment_late():
    testbed = AttackedValidator()
    await testbed.commit()
    strangers = [SigningKey(number.to_bytes(32, "big")).public for number in range(1, 65)]
    spaces = UnreachableStore(testbed.store, *(stranger.hex() for stranger in strangers), seconds=60.0)
    validator = replace(testbed.validator, store=spaces)
    await testbed.clock.sleep_until(testbed.run.deadline_time(WINDOW))
    cases = await read_window_cases(validator, WINDOW, {MINER.public: PLEDGE, **dict.fromkeys(strangers, PLEDGE)})
    draw_time = testbed.run.beacon.round_time(testbed.run.schedule.audit(WINDOW))
    assert [case.miner for case in cases.cases] == [MINER.public]
    assert cases.cases[0].read_time < testbed.clock.now() <= draw_time
    assert cases.undelivered == dict.fromkeys(strangers, PLEDGE)  # their storage was silent, and the miner's was not


@pytest.mark.parametrize("is_known", few_daily([False, True], 2), ids=["stranger", "known"])
async def test_a_miner_whose_batches_hang_costs_the_others_nothing(is_known: bool):
    network = Network(RULES)
    batches = paths.kind_prefix(key("hanging").public, "batches")
    hanging = UnreachableStore(network.store, batches, seconds=HANG_SECONDS, is_away=not is_known)
    network.mediums["validator-0"] = hanging
    async with run_nodes(network, miners=1) as nursery:
        nursery.start_soon(network.run_miner, "hanging", 2)
        await network.until_window(6)
        hanging.is_away = True
        await network.until_window(16)
    assert sum(map(bool, used_groups(network, range(6, 16), "miner-1").values())) >= 6
    verdicts_by_window = await verdicts(network, "hanging", range(8, 12))
    assert {item.reason for verdict in verdicts_by_window.values() for item in verdict.judgements} == {Reason.MISSING}


class StallingStore(DecoratedStore):
    """A store whose batches answer for the first group, and then nobody for some seconds, once in each window."""

    def __init__(self, inner: MemoryStore, seconds: float) -> None:
        super().__init__(inner)
        self.seconds = seconds
        self.stalls: dict[int, float] = {}  # by window, when (trio's time) it ends

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if "/batches/" in path and offset:
            window = paths.window_of(path)
            end = self.stalls.setdefault(window, trio.current_time() + self.seconds)
            await trio.sleep_until(end)
        return await self.inner.get(path, max_bytes, offset=offset, size=size)


async def test_a_stall_of_the_validator_itself_costs_no_miner_a_rejection():
    network = Network(RULES)
    schedule, period_ms = network.run.schedule, network.run.beacon.period_ms
    patience = 0.5 * (schedule.seal_rounds - schedule.audit_rounds) * period_ms / 1000
    network.mediums["validator-0"] = store = StallingStore(network.store, 1.01 * patience)
    async with run_nodes(network, miners=2):
        await network.until_window(8)
    for name in ("miner-1", "miner-2"):
        await check_accepted(network, name, range(8), at_least=4)
    assert len(store.stalls) >= 4


async def test_miners_that_hang_for_the_trainer_do_not_delay_an_honest_miners_groups():
    network = Network(RULES)
    names = [f"hanging-{number}" for number in range(6)]
    prefixes = (paths.kind_prefix(key(name).public, "commitments") for name in names)
    network.mediums["trainer/download"] = UnreachableStore(network.store, *prefixes, seconds=HANG_SECONDS)
    honest = key("miner-1").public.hex()[:8]
    delays: dict[int, float] = {}  # by window: seconds from its opening until its groups were handed over
    async with run_nodes(network, miners=1) as nursery:
        for name in names:
            nursery.start_soon(network.run_miner, name, 1)
        await network.until_window(1)
        while network.node("x").window() < 13:
            await trio.sleep(0.25)
            for event in network.events("trainer/download", "collected"):
                if event["miner"] == honest and event["used"]:
                    delay = network.clock.now() - network.run.opening_time(event["window"])
                    delays.setdefault(event["window"], delay)
    assert len(delays) >= 8
    assert max(delays.values()) < 6.0


async def test_an_outage_of_the_only_miners_storage_costs_it_no_rejection():
    network = Network(RULES)
    batches = paths.kind_prefix(key("miner-1").public, "batches")
    store = UnreachableStore(network.store, batches, seconds=HANG_SECONDS, is_away=False)
    network.mediums["validator-0"] = store
    # There is no other miner whose storage could show that the validator's own network works.
    async with run_nodes(network, miners=1):
        await network.until_window(6)
        store.is_away = True
        await network.until_window(12)
    await check_accepted(network, "miner-1", range(12))
    errors = [event["error"] for event in network.events("validator-0", "not-judged")]
    assert errors and all("none from other storage" in error for error in errors)


async def test_the_engine_serves_one_case_at_a_time_by_shares_and_by_version():
    order: list[tuple[Reputation, int]] = []
    used = {Reputation.KNOWN: 0.0, Reputation.STRANGER: 1.0, Reputation.REJECTED: 2.0}

    async def use(slot: Slot, reputation: Reputation, version: int) -> None:
        async with slot.reserve(reputation, version, 0):
            order.append((reputation, version))
            await trio.sleep(1.0)

    slot = Slot(used.__getitem__)
    cases = [(Reputation.STRANGER, 4), (Reputation.STRANGER, 5), (Reputation.STRANGER, 4), (Reputation.REJECTED, 5)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(use, slot, Reputation.STRANGER, 4)
        await trio.sleep(0.1)
        for case in cases:
            nursery.start_soon(use, slot, *case)
        await trio.sleep(0.1)
        with trio.move_on_after(0.1):
            await use(slot, Reputation.KNOWN, 3)  # gives up
        nursery.start_soon(use, slot, Reputation.KNOWN, 5)
    assert trio.current_time() >= 6.0
    assert order == [
        (Reputation.STRANGER, 4),
        (Reputation.KNOWN, 5),  # of all that wait, it has had least
        (Reputation.STRANGER, 5),
        (Reputation.STRANGER, 4),
        (Reputation.STRANGER, 4),
        (Reputation.REJECTED, 5),
    ]
    # A case that is cancelled while it gets the engine passes it on.
    async with trio.open_nursery() as nursery:
        nursery.start_soon(use, slot, Reputation.STRANGER, 1)
        await trio.sleep(0.1)
        with trio.move_on_after(0.9):
            await use(slot, Reputation.KNOWN, 2)
        await use(slot, Reputation.STRANGER, 3)
    assert order[-1] == (Reputation.STRANGER, 3)
