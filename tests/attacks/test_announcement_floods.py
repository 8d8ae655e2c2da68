"""Announcements by many strangers, and junk among the announcements: honest participants are found all the same."""

import random
from dataclasses import replace
from itertools import count, islice

import pytest
import trio

from grailnode.store.decorators.routed import KnownStores, RoutedStore
from grailnode.store.decorators.space_directory import SpaceDirectory
from grailnode.store.memory import MemoryStore
from protocol import limits, paths
from protocol.identity.admission import do_work, lottery
from protocol.identity.participant import Role
from protocol.identity.signing import SigningKey, open_signed, sign
from protocol.judging.ledger import LedgerRow, Summary
from roles.node.identity import Node
from roles.participants import find_participants
from roles.validator.ledger_state import Ledger
from tests.support.attacked_nodes.follower import VALIDATOR, AttackedFollower
from tests.support.attacked_nodes.trainer import FIRST, AttackedTrainer
from tests.support.builders import samples
from tests.support.builders.chains import MINER, TRAINER
from tests.support.simulation.virtual_clock import simulated

JUNK_COUNT = 40


async def finds_only_the_miner(node: Node, seconds: float, attempts: int) -> bool:
    """Return whether one of some attempts finds MINER and no other miner."""
    for _ in range(attempts):
        if [item.key for item in await find_participants(node, "miner")] == [MINER.public]:
            return True
        await trio.sleep(seconds)
    return False


@pytest.mark.parametrize("role", ["miner", "trainer", "validator"])
@simulated
async def test_strangers_that_claim_any_role_do_not_crowd_out_a_miner(role: Role, monkeypatch: pytest.MonkeyPatch):
    """Only miners need a proof of work, but a stranger that claims another role gains nothing by it."""
    monkeypatch.setattr(limits, "MAX_PARTICIPANTS", 4)
    testbed = AttackedFollower(admission=samples.admission(policy="open", credential="work", difficulty=4, miners=4))
    expires = int(testbed.clock.now() * 1000) + 3_000_000

    async def announce(key: SigningKey, role: Role, credential: bytes) -> None:
        fields = {"run": testbed.run_id, "key": key.public, "role": role, "groups": int(role == "miner")}
        record = samples.announcement(**fields, credential=credential, space="", expires_ms=expires)
        await testbed.store.put(paths.participant(key.public), sign(record, key))

    keys = (SigningKey(number.to_bytes(32, "big")) for number in count())
    miner_ticket = lottery(testbed.run_id, MINER.public)
    earlier_keys = (key for key in keys if lottery(testbed.run_id, key.public) < miner_ticket)
    for stranger in islice(earlier_keys, 4):
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
@simulated
async def test_junk_that_sorts_first_does_not_hide_a_miner(policy: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "MAX_LISTED_PARTICIPANTS", 32)
    monkeypatch.setattr(limits, "MAX_PARTICIPANTS", 16)
    testbed = await follower_among_junk(policy)
    assert await finds_only_the_miner(testbed.node, seconds=60, attempts=30)


@pytest.mark.parametrize("policy", ["open", "allowlist"])
@simulated
async def test_junk_that_sorts_first_at_a_meeting_point_does_not_hide_a_miner(
    policy: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limits, "MAX_PARTICIPANTS", 16)
    testbed = await follower_among_junk(policy)
    meeting, state, named_keys = testbed.store, MemoryStore(), {VALIDATOR.public, TRAINER.public}
    directory = SpaceDirectory(meeting, state, testbed.clock, testbed.run_id, named_keys)
    places = KnownStores(VALIDATOR.public, meeting, meeting, "beacon", {})
    routed = RoutedStore(places, directory, testbed.clock, lambda url, key: meeting)
    validator = replace(testbed.new_node(key=VALIDATOR, state=state), store=routed)
    assert await finds_only_the_miner(validator, seconds=60, attempts=30)


@simulated
async def test_many_miners_that_change_their_keys_leave_the_ledger_readable():
    testbed, state, rng = AttackedTrainer(), MemoryStore(), random.Random(1)
    ledger = await Ledger.open(state, testbed.run)
    for window in range(3):
        keys = sorted(rng.randbytes(32) for _ in range(limits.MAX_PARTICIPANTS // 2))
        rows = tuple(LedgerRow.undelivered(miner, 1) for miner in keys)
        summary = testbed.summary(FIRST, window=window).model_copy(update={"rows": rows, "previous": ledger.tip})
        entry = await ledger.record(summary)
        assert open_signed(sign(entry, FIRST), Summary, [FIRST.public]).record == entry
    assert (await Ledger.open(state, testbed.run)).newest == 2
