"""Storage that hangs, does not answer, answers falsely or loses objects, for a short and a long time, and clocks set
back: nobody else is delayed, and no honest miner is refused.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import trio

from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.identity.signing import SigningKey, open_signed
from protocol.judging.ledger import Seal
from protocol.judging.verdict import Reason
from roles.node.identity import Node
from roles.ports import ObjectStore, StoreError
from roles.validator.judging_scheduler import Reputation, Slot
from roles.validator.window_cases import read_window_cases
from tests.support.attacked_nodes.trainer import WINDOW, read_outcomes
from tests.support.attacked_nodes.validator import PLEDGE, AttackedValidator
from tests.support.builders.chains import MINER
from tests.support.faults.decorated_store import DecoratedStore, UnreachableStore
from tests.support.pytest_options.few_daily import few_daily
from tests.support.simulation.faulty_network import WrongClock
from tests.support.simulation.network import Network, key
from tests.support.simulation.network_runs import RULES, check_accepted, run_nodes, used_groups, verdicts
from tests.support.simulation.recording_store import RecordingStore
from tests.support.simulation.virtual_clock import running

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


@pytest.mark.parametrize(
    ("is_known", "was_silent"), [(False, False), (True, False), (True, True)], ids=["newcomer", "known", "known-silent"]
)
async def test_a_crowd_that_hangs_is_read_after_known_miners_and_the_next_time_after_newcomers(
    is_known: bool, was_silent: bool
):
    testbed = AttackedValidator()
    await testbed.commit()
    strangers = [SigningKey(number.to_bytes(32, "big")).public for number in range(1, 1001)]
    spaces = UnreachableStore(testbed.store, *(stranger.hex() for stranger in strangers), seconds=60.0)
    validator = replace(testbed.validator, store=spaces)
    validator.silent_miners.add([MINER.public] if was_silent else [])
    pledges = {MINER.public: PLEDGE, **dict.fromkeys(strangers, PLEDGE)}
    for window in [WINDOW] if is_known else range(WINDOW - 4, WINDOW + 1):  # in each, a quarter of the crowd is asked
        await testbed.clock.sleep_until(testbed.run.deadline_time(window))
        history = frozenset([MINER.public] if is_known else [])
        cases = await read_window_cases(validator, window, pledges, history)
    assert [case.miner for case in cases.cases] == [MINER.public]


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
        async with slot.reserve(reputation, version, 0, 0):
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


# Storage that does not answer, answers falsely, or loses objects


class FlakyStore(DecoratedStore):
    """A store that fails below one prefix. In turn, by window, two of three reads of each part are false, every other
    one fails, and the first one hangs.
    """

    def __init__(self, inner: MemoryStore, prefix: str) -> None:
        super().__init__(inner)
        self._prefix = prefix
        self.reads: Counter[tuple[str, int]] = Counter()

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        data = await self.inner.get(path, max_bytes, offset=offset, size=size)
        if not path.startswith(self._prefix):
            return data
        self.reads[path, offset] += 1
        reads, how = self.reads[path, offset], paths.window_of(path) % 3
        if how == 0 and reads % 3:
            return data[:-1] + bytes([data[-1] ^ 1 << reads % 8])
        if how == 1 and reads % 2:
            raise StoreError(f"{path}: the connection was reset")
        if how == 2 and reads == 1:
            await trio.sleep(60.0)
        return data


async def test_an_unreachable_miner_delays_nobody_and_its_groups_are_recorded_in_the_end():
    network = Network(RULES)
    batches = paths.kind_prefix(key("miner-1").public, "batches")
    network.mediums["trainer/download"] = UnreachableStore(network.store, batches)
    async with run_nodes(network):
        await network.until_window(9)
    collected_events: dict[str, list[dict[str, Any]]] = {}
    for event in network.events("trainer/download", "collected"):
        collected_events.setdefault(event["miner"], []).append(event)
    reachable = collected_events[key("miner-2").public.hex()[:8]]
    assert len(reachable) >= 6
    assert sum(event["used"] for event in reachable) >= 4 * 4
    assert not any(event["used"] for event in collected_events.get(key("miner-1").public.hex()[:8], []))
    assert (await network.head()).version >= 4  # the trainer goes on learning
    outcomes = {
        record.window: {item.status for item in record.outcomes}
        for record in await read_outcomes(network.states["trainer"])
        if record.miner == key("miner-1").public
    }
    assert {1, 2} <= outcomes.keys()
    assert set.union(*outcomes.values()) == {"unreachable"}


async def test_failures_of_storage_cost_a_miner_no_rejection():
    network = Network(RULES)
    prefix = paths.kind_prefix(key("miner-1").public, "batches")
    network.mediums["validator-0"] = flaky_store = FlakyStore(network.store, prefix)
    async with run_nodes(network):
        await network.until_window(8)
    assert flaky_store.reads.total() >= 4 * 2 * 3
    await check_accepted(network, "miner-1", range(7), at_least=5)


async def test_a_validator_that_cannot_read_a_version_abstains_on_commitments_to_it():
    network = Network(RULES)
    head = paths.head(key("trainer").public)
    network.mediums["validator-0"] = store = UnreachableStore(network.store, head, seconds=0.0, is_away=False)
    async with run_nodes(network):
        await network.until_window(5)
        newest = (await network.head()).version
        store.is_away = True
        await network.until_window(9)
    log = network.logs["validator-0"]
    assert not any(event["rejected"] for event in log.named("verdict"))
    delivered = network.events("miner-1", "delivered")
    unknown_windows = {event["window"] for event in delivered if event["version"] > newest}
    assert 8 in unknown_windows
    assert {event["window"] for event in log.named("not-judged")} == unknown_windows
    assert not log.named("window-abandoned")


# Long outages of storage on a virtual clock: one node is cut off, the newest objects are lost, the meeting point is
# replaced by an empty one. The network works on without what is missing, and as before when it is back.


FIRST, LAST = 6, 30
"""The windows during which storage fails."""


def check_no_contradiction(network: Network) -> None:
    """Check that nobody contradicted itself, and that no honest group was refused for what it contains."""
    for log in network.logs.values():
        assert not log.named("alarm")
        for verdict in log.named("verdict"):
            reasons = verdict.get("reasons", "")  # a node's own events have none
            assert set(filter(None, reasons.split(","))) <= {"version", "missing"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["miner-1", "validator-1", "trainer"])
async def test_a_node_that_storage_refuses_for_long_works_again_afterwards(name: str) -> None:
    network = Network(RULES, validators=2)
    everything = ("put", "get", "list", "delete")
    store = UnreachableStore(network.store, "", operations=everything, seconds=0.5, is_away=False)
    network.mediums[name] = store
    async with run_nodes(network):
        await network.until_window(FIRST)
        store.is_away = True
        await network.until_window(FIRST + 4)  # what was under way has ended
        before = (await network.head()).version
        await network.until_window(LAST)
        during = (await network.head()).version
        store.is_away = False
        await network.until_window(LAST + 12)
        after = (await network.head()).version
    assert (during > before + 3) == (name != "trainer"), "the others go on without it"
    assert after > during + 2
    if name.startswith("miner"):
        assert any(event["window"] >= LAST for event in network.events(name, "delivered"))
    if name.startswith("validator"):
        assert any(event["window"] >= LAST and event["accepted"] for event in network.events(name, "verdict"))
    check_no_contradiction(network)


async def fail_over(store: RecordingStore, bucket: str, count: int) -> None:
    """Undo the last puts below a prefix, as if a replica took over that is a little behind."""
    puts = store.under(bucket)
    for number in reversed(range(len(puts) - count, len(puts))):
        before = [put.data for put in puts[:number] if put.path == puts[number].path]
        await (store.put(puts[number].path, before[-1]) if before else store.delete(puts[number].path))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trainer", "validator-0", "miner-1"])
async def test_a_bucket_that_loses_its_newest_objects_stops_nobody_for_long(name: str) -> None:
    network = Network(RULES)
    network.store = store = RecordingStore()
    async with run_nodes(network):
        await network.until_window(FIRST)
        await fail_over(store, paths.writer_prefix(key(name).public), 10)
        await network.until_window(FIRST + 8)
        before = (await network.head()).version
        await network.until_window(FIRST + 24)
        assert (await network.head()).version > before + 3
        recent = [event for event in network.events("validator-0", "verdict") if event["window"] > FIRST + 12]
        assert any(event["accepted"] for event in recent)
    check_no_contradiction(network)


@pytest.mark.slow
async def test_a_meeting_point_that_is_replaced_by_an_empty_one_fills_again() -> None:
    network = Network(RULES)
    async with run_nodes(network):
        await network.until_window(FIRST)
        for prefix in (paths.participants(), "runs/", "revisions/"):
            for info in [info async for info in network.store.list(prefix)]:
                await network.store.delete(info.path)
        await network.until_window(FIRST + 18)
        keys = {info.path async for info in network.store.list(paths.participants())}
        for name in ("miner-1", "miner-2", "validator-0", "trainer"):
            assert paths.participant(key(name).public) in keys, f"{name} did not announce itself again"
        recent = [event for event in network.events("validator-0", "verdict") if event["window"] > FIRST + 13]
        assert any(event["accepted"] for event in recent)
    check_no_contradiction(network)


# A node that restarts with a clock that was set back (a machine without a battery, a restored snapshot)


class OneClockBehind(Network):
    """A network whose validator has its own clock."""

    validator_clock: WrongClock

    def node(self, name: str, process: str = "", store: ObjectStore | None = None) -> Node:
        node = super().node(name, process, store)
        if name != "validator-0":
            return node
        return replace(node, clock=self.validator_clock, shared_revisions=node.revisions)


async def test_a_restart_with_a_clock_that_was_set_back_seals_no_window_twice():
    network = OneClockBehind(RULES)
    network.validator_clock = WrongClock(network.clock)
    network.store = store = RecordingStore()
    own = key("validator-0").public
    async with running(network.run_beacon) as nursery:
        nursery.start_soon(network.run_trainer)
        nursery.start_soon(network.run_miner, "miner-1")
        with trio.move_on_after(network.run.opening_time(10) - network.clock.now()):
            await network.run_validator("validator-0")
        network.validator_clock.error_seconds = -5 * (network.run.opening_time(1) - network.run.opening_time(0))
        with trio.move_on_after(20.0):
            await network.run_validator("validator-0")
    summaries: dict[int, set[bytes]] = {}
    for put in store.under(paths.kind_prefix(own, "seals")):
        seal = open_signed(put.data, Seal, [own]).record
        summaries.setdefault(seal.window, set()).add(seal.summary)
    assert len(summaries) >= 9
    assert all(len(digests) == 1 for digests in summaries.values())
