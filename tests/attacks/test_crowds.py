"""Crowds of strangers, and of junk, among the announcements: honest participants are found all the same."""

import random
from dataclasses import replace
from itertools import count, islice

import pytest
import trio
from trio.testing import MockClock

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
from tests.support.attacks.court import FIRST, Court
from tests.support.attacks.target import VALIDATOR, Target, attack
from tests.support.builders import samples
from tests.support.builders.chains import MINER, TRAINER

CROWD = 40


async def finds_only_the_miner(node: Node, seconds: float, attempts: int) -> bool:
    """Return whether one of some attempts finds MINER and no other miner."""
    for _ in range(attempts):
        if [item.key for item in await find_participants(node, "miner")] == [MINER.public]:
            return True
        await trio.sleep(seconds)
    return False


@pytest.mark.parametrize("role", ["miner", "trainer", "validator"])
def test_strangers_that_claim_any_role_do_not_crowd_out_a_miner(role: Role, monkeypatch: pytest.MonkeyPatch):
    """Only miners need a proof of work, but a stranger that claims another role gains nothing by it."""
    monkeypatch.setattr(limits, "MAX_PARTICIPANTS", 4)

    async def scenario() -> None:
        target = Target(admission=samples.admission(policy="open", credential="work", difficulty=4, miners=4))
        expires = int(target.clock.now() * 1000) + 3_000_000

        async def announce(key: SigningKey, role: Role, proof: bytes) -> None:
            fields = {"run": target.run_id, "key": key.public, "role": role, "groups": int(role == "miner")}
            record = samples.announcement(**fields, proof=proof, space="", expires_ms=expires)
            await target.store.put(paths.participant(key.public), sign(record, key))

        keys = (SigningKey(number.to_bytes(32, "big")) for number in count())
        miner_ticket = lottery(target.run_id, MINER.public)
        earlier = (key for key in keys if lottery(target.run_id, key.public) < miner_ticket)
        for stranger in islice(earlier, 4):
            await announce(stranger, role, b"")
        await announce(MINER, "miner", do_work(target.run_id, MINER.public, 4, expires).to_bytes())
        assert await finds_only_the_miner(target.node, seconds=5, attempts=10)

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


async def crowded(policy: str) -> Target:
    """Return a target whose store lists more junk before the miner's announcement than one listing shows."""
    allowlist = (MINER.public,) if policy == "allowlist" else ()
    target = Target(admission=samples.admission(policy=policy, allowed=allowlist, miners=16))
    for number in range(CROWD):
        await target.store.put(paths.participant(number.to_bytes(32, "big")), b"x")
    await target.node.announce("miner", 3600.0)
    return target


@pytest.mark.parametrize("policy", ["open", "allowlist"])
def test_junk_that_sorts_first_does_not_hide_a_miner(policy: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "MAX_LISTED_PARTICIPANTS", 32)
    monkeypatch.setattr(limits, "MAX_PARTICIPANTS", 16)

    async def scenario() -> None:
        target = await crowded(policy)
        assert await finds_only_the_miner(target.node, seconds=60, attempts=30)

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("policy", ["open", "allowlist"])
def test_junk_that_sorts_first_at_a_meeting_point_does_not_hide_a_miner(policy: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "MAX_PARTICIPANTS", 16)

    async def scenario() -> None:
        target = await crowded(policy)
        meeting, state, named_keys = target.store, MemoryStore(), {VALIDATOR.public, TRAINER.public}
        directory = SpaceDirectory(meeting, state, target.clock, target.run_id, named_keys)
        places = KnownStores(VALIDATOR.public, meeting, meeting, "beacon", {})
        routed = RoutedStore(places, directory, target.clock, lambda url, key: meeting)
        validator = replace(target.new_node(key=VALIDATOR, state=state), store=routed)
        assert await finds_only_the_miner(validator, seconds=60, attempts=30)

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


@attack
async def test_a_crowd_that_changes_its_keys_leaves_the_ledger_readable():
    court, state, rng = Court(), MemoryStore(), random.Random(1)
    ledger = await Ledger.open(state, court.run.scoring)
    for window in range(3):
        keys = sorted(rng.randbytes(32) for _ in range(limits.MAX_PARTICIPANTS // 2))
        rows = tuple(LedgerRow.undelivered(miner, 1) for miner in keys)
        summary = court.summary(FIRST, window=window).model_copy(update={"rows": rows, "previous": ledger.tip})
        entry = await ledger.record(summary)
        assert open_signed(sign(entry, FIRST), Summary, [FIRST.public]).record == entry
    assert (await Ledger.open(state, court.run.scoring)).newest == 2
