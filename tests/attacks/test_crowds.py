"""Crowds of strangers, and of junk without any key, where participants announce themselves: the honest are seen all the
same.
"""

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


async def comes_to_see_the_miner(node: Node, seconds: float, looks: int) -> bool:
    """Whether the miner, and nobody else, is a miner in one of some looks."""
    for _ in range(looks):
        if [found.key for found in await find_participants(node, "miner")] == [MINER.public]:
            return True
        await trio.sleep(seconds)
    return False


@pytest.mark.parametrize("role", ["miner", "trainer", "validator"])
def test_strangers_who_claim_any_role_do_not_take_the_room_for_ever(role: Role, monkeypatch: pytest.MonkeyPatch):
    """Work is asked of miners only; who claims another role without being named has it no better."""
    monkeypatch.setattr(limits, "MAX_PARTICIPANTS", 4)

    async def scenario() -> None:
        target = Target(admission=samples.admission(policy="open", credential="work", difficulty=4, miners=4))
        expires = int(target.clock.now() * 1000) + 3_000_000

        async def announce(key: SigningKey, role: Role, proof: bytes) -> None:
            fields = {"run": target.run_id, "key": key.public, "role": role, "groups": int(role == "miner")}
            record = samples.announcement(**fields, proof=proof, space="", expires_ms=expires)
            await target.store.put(paths.participant(key.public), sign(record, key))

        everybody = (SigningKey(number.to_bytes(32, "big")) for number in count())
        mine = lottery(target.run_id, MINER.public)
        luckier = (key for key in everybody if lottery(target.run_id, key.public) < mine)
        for stranger in islice(luckier, 4):
            await announce(stranger, role, b"")
        await announce(MINER, "miner", do_work(target.run_id, MINER.public, 4, expires).to_bytes())
        assert await comes_to_see_the_miner(target.node, seconds=5, looks=10)

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


async def crowded(policy: str) -> Target:
    """A store with a miner's announcement, and with more junk before it than a listing shows."""
    allowed = (MINER.public,) if policy == "allowlist" else ()
    target = Target(admission=samples.admission(policy=policy, allowed=allowed, miners=16))
    for number in range(CROWD):
        await target.store.put(paths.participant(number.to_bytes(32, "big")), b"x")
    await target.node.announce("miner", 3600.0)
    return target


@pytest.mark.parametrize("policy", ["open", "allowlist"])
def test_junk_that_sorts_first_does_not_hide_whoever_comes_later(policy: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "MAX_LISTED_PARTICIPANTS", 32)
    monkeypatch.setattr(limits, "MAX_PARTICIPANTS", 16)

    async def scenario() -> None:
        target = await crowded(policy)
        assert await comes_to_see_the_miner(target.node, seconds=60, looks=30)

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("policy", ["open", "allowlist"])
def test_junk_that_sorts_first_at_a_meeting_point(policy: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "MAX_PARTICIPANTS", 16)

    async def scenario() -> None:
        target = await crowded(policy)
        meeting, state, named = target.store, MemoryStore(), {VALIDATOR.public, TRAINER.public}
        directory = SpaceDirectory(meeting, state, target.clock, target.run_id, named)
        places = KnownStores(VALIDATOR.public, meeting, meeting, "beacon", {})
        routed = RoutedStore(places, directory, target.clock, lambda url, key: meeting)
        validator = replace(target.new_node(key=VALIDATOR, state=state), store=routed)
        assert await comes_to_see_the_miner(validator, seconds=60, looks=30)

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


@attack
async def test_a_crowd_that_changes_keys_leaves_a_ledger_that_can_be_read():
    court, state, rng = Court(), MemoryStore(), random.Random(1)
    ledger = await Ledger.open(state, court.run.scoring)
    for window in range(3):
        keys = sorted(rng.randbytes(32) for _ in range(limits.MAX_PARTICIPANTS // 2))
        rows = tuple(LedgerRow.undelivered(miner, 1) for miner in keys)
        summary = court.summary(FIRST, window=window).model_copy(update={"rows": rows, "previous": ledger.tip})
        entered = await ledger.record(summary)
        assert open_signed(sign(entered, FIRST), Summary, [FIRST.public]).record == entered
    assert (await Ledger.open(state, court.run.scoring)).newest == 2
