"""Crowds of strangers: announcements, junk among them, and ground keys. Honest participants are found all the same."""

import random
from dataclasses import replace
from itertools import count, islice

import pytest
import trio

from grailnode.observe.observer import Observer
from grailnode.store.decorators.limiting import MeteredStore
from grailnode.store.decorators.routed import KnownStores, RoutedStore, SpaceDirectory
from grailnode.store.memory import MemoryStore
from protocol import limits, paths
from protocol.identity.admission import do_work, draw_places, lottery
from protocol.identity.participant import Role
from protocol.identity.signing import SigningKey, open_signed, sign
from protocol.judging.ledger import LedgerRow, Summary
from roles.node.identity import Node
from roles.participants import find_participants
from roles.validator.ledger_state import Ledger
from roles.validator.window_cases import read_window_cases
from tests.support.attacked_nodes.follower import VALIDATOR, AttackedFollower
from tests.support.attacked_nodes.trainer import FIRST, WINDOW, AttackedTrainer
from tests.support.attacked_nodes.validator import PLEDGE, AttackedValidator
from tests.support.builders import samples
from tests.support.builders.chains import MINER, TRAINER
from tests.support.measuring.store_tally import TallyMeter

JUNK_COUNT = 40


async def finds_only_the_miner(node: Node, seconds: float, attempts: int) -> bool:
    """Return whether one of some attempts finds MINER and no other miner."""
    for _ in range(attempts):
        if [item.key for item in await find_participants(node, "miner")] == [MINER.public]:
            return True
        await trio.sleep(seconds)
    return False


@pytest.mark.parametrize("role", ["miner", "trainer", "validator"])
async def test_strangers_that_claim_any_role_do_not_crowd_out_a_miner(role: Role, monkeypatch: pytest.MonkeyPatch):
    """Only miners need a proof of work, but a stranger that claims another role gains nothing by it."""
    monkeypatch.setattr(limits, "MAX_STRANGERS", 4)
    testbed = AttackedFollower(admission=samples.admission(policy="open", credential="work", difficulty=4, miners=4))
    expires = int(testbed.clock.now() * 1000) + 3_000_000

    async def announce(key: SigningKey, role: Role, credential: bytes) -> None:
        fields = {"run": testbed.run_id, "key": key.public, "role": role, "groups": int(role == "miner")}
        record = samples.announcement(**fields, credential=credential, space="", expires_ms=expires)
        await testbed.store.put(paths.participant(key.public), sign(record, key))

    for stranger in ground_keys(testbed.run_id, 4):
        await announce(stranger, role, b"")
    await announce(MINER, "miner", do_work(testbed.run_id, MINER.public, 4, expires).to_bytes())
    assert await finds_only_the_miner(testbed.node, seconds=5, attempts=10)


async def follower_among_junk(policy: str) -> AttackedFollower:
    """Return a testbed whose store lists more junk before the miner's announcement than one listing shows."""
    allowlist = (MINER.public,) if policy == "allowlist" else ()
    testbed = AttackedFollower(admission=samples.admission(policy=policy, allowed=allowlist, miners=16))
    for number in range(JUNK_COUNT):
        await testbed.store.put(paths.participant(number.to_bytes(32, "big")), b"x")
    await testbed.node.announce("miner", 3600.0)
    return testbed


@pytest.mark.parametrize("policy", ["open", "allowlist"])
async def test_junk_that_sorts_first_does_not_hide_a_miner(policy: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "MAX_LISTED_PARTICIPANTS", 32)
    monkeypatch.setattr(limits, "MAX_STRANGERS", 16)
    testbed = await follower_among_junk(policy)
    assert await finds_only_the_miner(testbed.node, seconds=60, attempts=30)


@pytest.mark.parametrize("policy", ["open", "allowlist"])
async def test_junk_that_sorts_first_at_a_meeting_point_does_not_hide_a_miner(
    policy: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limits, "MAX_PARTICIPANTS", 16)
    monkeypatch.setattr(limits, "MAX_LISTED_PARTICIPANTS", 32)
    monkeypatch.setattr(limits, "MAX_STRANGERS", 16)
    testbed = await follower_among_junk(policy)
    meeting, state, named_keys = testbed.store, MemoryStore(), {VALIDATOR.public, TRAINER.public}
    directory = SpaceDirectory(meeting, state, testbed.clock, testbed.run_id, lambda: named_keys)
    places = KnownStores(VALIDATOR.public, meeting, meeting, "beacon", {})
    routed = RoutedStore(places, directory, testbed.clock, lambda url, key: meeting)
    validator = replace(testbed.new_node(key=VALIDATOR, state=state), store=routed)
    assert await finds_only_the_miner(validator, seconds=60, attempts=30)


async def test_many_miners_that_change_their_keys_leave_the_ledger_readable():
    testbed, state, rng = AttackedTrainer(), MemoryStore(), random.Random(1)
    ledger = await Ledger.open(state, testbed.run)
    for window in range(2):
        keys = sorted(rng.randbytes(32) for _ in range(limits.MAX_WINDOW_MINERS // 2))
        rows = tuple(LedgerRow(miner=miner, pledged=1) for miner in keys)
        summary = testbed.summary(FIRST, window=window).model_copy(update={"rows": rows, "previous": ledger.tip})
        entry = await ledger.record(summary)
    assert open_signed(sign(entry, FIRST), Summary, [FIRST.public]).record == entry
    assert (await Ledger.open(state, testbed.run)).newest == 1


# Crowds of keys, ground so that they win the lottery for a reader's places: honest miners are seen all the same


CROWD = [samples.key(f"crowd {number}").public for number in range(400)]
HONEST = {samples.key(f"honest {number}").public for number in range(16)}


def ground_keys(salt: bytes, places: int, first: int = 1) -> list[SigningKey]:
    """Return keys that all come before MINER with a salt."""
    keys = (SigningKey(number.to_bytes(32, "big")) for number in count(first))
    return list(islice((key for key in keys if lottery(salt, key.public) < lottery(salt, MINER.public)), places))


async def test_keys_ground_for_the_run_do_not_hide_a_miner_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_STRANGERS", 4)
    testbed = AttackedValidator()
    node = testbed.validator_of_few(2)
    for crowd_key in ground_keys(testbed.run_id, 8):
        await testbed.announce(crowd_key, expires_ms=1 << 50)
    await testbed.announce(expires_ms=1 << 50)
    sightings = 0
    for _ in range(40):
        await node.time.wait_for_newest_round()
        sightings += MINER.public in [item.key for item in await find_participants(node, "miner")]
        await trio.sleep(node.run.schedule.rounds * node.run.beacon.period_ms / 1000)
    assert 4 < sightings < 40  # of 9 keys, 4 are read each time, and 4 that were not admitted yet


async def test_no_crowd_of_junk_costs_more_reads_than_strangers_have_and_admitted_miners_are_read_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_STRANGERS", 16)
    testbed, meter = AttackedValidator(), TallyMeter()
    node = replace(testbed.validator, store=MeteredStore(testbed.store, meter))
    await testbed.announce(expires_ms=1 << 50)
    await find_participants(node, "miner")
    for number in range(500):
        await testbed.store.put(paths.participant(number.to_bytes(32, "big")), b"junk")
    for _ in range(5):
        meter.tallies.clear()
        assert [item.key for item in await find_participants(node, "miner")] == [MINER.public]
        assert sum(tally.count for (kind, _), tally in meter.tallies.items() if kind == "get") <= 1 + 16 + 2  # and salt


async def test_an_observer_reads_no_announcement_of_a_crowd_that_no_validator_judged() -> None:
    testbed, meter = AttackedValidator(), TallyMeter()
    observer = Observer(replace(testbed.validator, store=MeteredStore(testbed.store, meter)), WINDOW)
    for number in range(40):
        await testbed.announce(samples.key(f"crowd {number}"), expires_ms=1 << 50)
    await observer.refresh()
    assert sum(tally.count for (kind, _), tally in meter.tallies.items() if kind == "get") < 40


async def test_keys_made_when_the_salt_was_out_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_STRANGERS", 4)
    testbed = AttackedValidator()
    node = testbed.validator_of_few(2)
    await node.time.wait_for_newest_round()
    await testbed.announce(expires_ms=1 << 50)
    await find_participants(node, "miner")
    for attempt in range(1, 10):
        await trio.sleep(node.run.schedule.rounds * node.run.beacon.period_ms / 1000)
        window = node.run.schedule.window_at(await node.time.wait_for_newest_round())
        salt = await node.time.randomness(node.run.schedule.opening(window))
        for crowd_key in ground_keys(salt, 8, 1000 * attempt):
            await testbed.announce(crowd_key, expires_ms=1 << 50)
        node.announcements.forget(MINER.public)  # a stranger again
        assert MINER.public in [item.key for item in await find_participants(node, "miner")]
        for crowd_key in ground_keys(salt, 8, 1000 * attempt):
            await testbed.store.delete(f"participants/{crowd_key.public.hex()}")


def test_places_are_kept_for_those_with_a_history() -> None:
    for salt in range(20):
        winners = draw_places(bytes([salt]), [*CROWD, *HONEST], HONEST, 128)
        assert len(winners) == 128
        assert set(winners) >= HONEST


def test_newcomers_get_a_quarter_of_the_places_however_many_are_known() -> None:
    newcomers = {samples.key(f"newcomer {number}").public for number in range(4)}
    sightings = {key for salt in range(200) for key in draw_places(bytes([salt]), [*CROWD, *newcomers], set(CROWD), 16)}
    assert newcomers <= sightings
    assert all(len(draw_places(bytes([salt]), CROWD[:10], HONEST, 16)) == 10 for salt in range(5))


async def test_a_known_miner_has_a_place_in_every_window_and_the_others_are_drawn_anew() -> None:
    testbed, drawn = AttackedValidator(), set()
    node = testbed.validator_of_few(4)
    pledges = dict.fromkeys([*CROWD[:40], MINER.public], PLEDGE)
    for window in range(WINDOW, WINDOW + 3):
        await node.time.wait_for_newest_round()
        cases = await read_window_cases(node, window, pledges, {MINER.public})
        assert MINER.public in cases.undelivered
        assert len(cases.undelivered) == 4
        drawn.add(frozenset(cases.undelivered))
    assert len(drawn) == 3
