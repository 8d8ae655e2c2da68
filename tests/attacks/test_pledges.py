"""Miners that lie about their pledges and commitments to a validator (roles/validator/window_cases.py)."""

from dataclasses import replace
from typing import Any

import pytest
import trio

from grailnode.store.memory import MemoryStore
from protocol import limits, paths
from protocol.identity.participant import Announcement
from protocol.identity.signing import SigningKey, sign
from protocol.rollout.batch import Commitment, assemble
from roles.node.identity import Node
from roles.validator.window_cases import Pledges, WindowCases, read_window_cases
from tests.support.attacks.court import FIRST, STRANGER, WINDOW, Court
from tests.support.attacks.target import attack
from tests.support.builders import samples
from tests.support.builders.chains import MINER, make_node
from tests.support.simulation.network import Log

HOUR_MS = 3_600_000


class Bench(Court):
    """A validator that reads pledges and commitments."""

    def __init__(self) -> None:
        super().__init__()
        self.validator: Node = make_node(
            self.run_id, self.run, self.store, MemoryStore(), Log("validator"), FIRST, clock=self.clock
        )
        self.pledges = Pledges(self.validator)

    def announcement(self, miner: SigningKey = MINER, **changes: Any) -> Announcement:
        """Return the announcement of a pledge of two groups, valid for an hour."""
        own: dict[str, Any] = {
            "run": self.run_id,
            "key": miner.public,
            "role": "miner",
            "name": "",
            "space": "",
            "groups": 2,
            "proof": b"",
            "expires_ms": int(self.clock.now() * 1000) + HOUR_MS,
        }
        return Announcement(**(own | changes))

    async def announce(self, miner: SigningKey = MINER, signer: SigningKey | None = None, **changes: Any) -> None:
        """Put a pledge at the miner's path."""
        data = sign(self.announcement(miner, **changes), signer or miner)
        await self.store.put(paths.participant(miner.public), data)

    async def commit(self, signer: SigningKey = MINER, **changes: Any) -> Commitment:
        """Put a commitment at the miner's path, and return it."""
        commitment = assemble(self.groups)[1].model_copy(update=changes)
        await self.store.put(paths.commitment(MINER.public, WINDOW), sign(commitment, signer))
        return commitment

    async def read_cases(self) -> WindowCases:
        """Return the window's cases if the miner has pledged two groups."""
        return await read_window_cases(self.validator, WINDOW, {MINER.public: 2})


# Pledges


@attack
async def test_a_pledge_counts():
    bench = Bench()
    await bench.announce()
    assert await bench.pledges.read() == {MINER.public: 2}


@attack
async def test_forged_pledge_at_another_miners_path():
    bench = Bench()
    await bench.announce(signer=STRANGER)
    assert await bench.pledges.read() == {}


@attack
async def test_forged_pledge_for_more_than_a_miner_may_deliver():
    bench = Bench()
    await bench.announce(groups=limits.MAX_GROUPS)
    assert await bench.pledges.read() == {MINER.public: bench.run.groups}


@attack
async def test_forged_pledge_of_another_run():
    bench = Bench()
    await bench.announce(run=bytes(32))
    assert await bench.pledges.read() == {}


@attack
async def test_oversized_pledge():
    bench = Bench()
    await bench.announce(STRANGER)
    await bench.store.put(paths.participant(MINER.public), bytes(1 << 20))
    assert await bench.pledges.read() == {STRANGER.public: 2}


@attack
async def test_duplicated_pledge_under_another_key():
    bench = Bench()
    await bench.announce()
    data = await bench.store.get(paths.participant(MINER.public), 1 << 20)
    await bench.store.put(paths.participant(STRANGER.public), data)
    assert await bench.pledges.read() == {MINER.public: 2}


@attack
async def test_duplicated_void_pledge():
    bench = Bench()
    await bench.announce()
    old = await bench.store.get(paths.participant(MINER.public), 1 << 20)
    await bench.pledges.read()
    bench.pledges.void(MINER.public)
    assert await bench.pledges.read() == {}
    await bench.store.put(paths.participant(MINER.public), old)
    assert await bench.pledges.read() == {}
    await bench.announce(expires_ms=int(bench.clock.now() * 1000) + 2 * HOUR_MS)
    assert await bench.pledges.read() == {MINER.public: 2}


@attack
async def test_forged_pledge_in_place_of_a_cached_one():
    bench = Bench()
    await bench.announce()
    assert await bench.pledges.read() == await bench.pledges.read() == {MINER.public: 2}
    await bench.announce(groups=3)
    assert await bench.pledges.read() == {MINER.public: 3}
    await bench.announce(signer=STRANGER, groups=4)
    assert await bench.pledges.read() == {}


@attack
async def test_duplicated_cached_pledge_expires():
    bench = Bench()
    await bench.announce()
    assert await bench.pledges.read() == {MINER.public: 2}
    await trio.sleep(HOUR_MS / 1000 + 1.0)
    assert await bench.pledges.read() == {}


@attack
async def test_withheld_pledge_does_not_count():
    bench = Bench()
    await bench.announce()
    await bench.store.delete(paths.participant(MINER.public))
    assert await bench.pledges.read() == {}


# Commitments


@attack
async def test_a_commitment_is_a_case():
    bench = Bench()
    commitment = await bench.commit()
    cases = await bench.read_cases()
    assert [case.commitment.record for case in cases.cases] == [commitment]
    assert cases.undelivered == {}


@pytest.mark.parametrize(
    "changes", [{"window": WINDOW + 1}, {"run": bytes(32)}, {"miner": STRANGER.public}, {"groups": ()}], ids=str
)
def test_forged_commitment_for_elsewhere_counts_as_undelivered(changes: dict[str, Any]) -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.commit(**changes)
        cases = await bench.read_cases()
        assert (cases.cases, cases.undelivered) == ((), {MINER.public: 2})

    attack(scenario)()


@attack
async def test_forged_commitment_by_a_stranger():
    bench = Bench()
    await bench.commit(STRANGER)
    cases = await bench.read_cases()
    assert (cases.cases, cases.undelivered) == ((), {MINER.public: 2})


@attack
async def test_oversized_commitment():
    bench = Bench()
    await bench.store.put(paths.commitment(MINER.public, WINDOW), bytes(limits.MAX_COMMITMENT_BYTES))
    cases = await bench.read_cases()
    assert (cases.cases, cases.undelivered) == ((), {MINER.public: 2})


@attack
async def test_oversized_delivery_counts_up_to_the_pledge():
    bench = Bench()
    bench.groups = [bench.group(index) for index in range(5)]
    await bench.commit()
    (case,) = (await bench.read_cases()).cases
    assert (case.pledged_groups, case.submitted_groups) == (2, 2)


@attack
async def test_withheld_commitment_counts_as_undelivered_and_an_unreadable_one_does_not():
    bench = Bench()
    assert (await bench.read_cases()).undelivered == {MINER.public: 2}
    await bench.commit()
    bench.store.silent = (MINER.public.hex(),)
    cases = await bench.read_cases()
    assert (cases.cases, cases.undelivered) == ((), {})


@attack
async def test_duplicated_commitment_of_a_neighbour():
    bench = Bench()
    data = sign(assemble([bench.group(0, miner=STRANGER.public)])[1], STRANGER)
    await bench.store.put(paths.commitment(MINER.public, WINDOW), data)
    cases = await bench.read_cases()
    assert (cases.cases, cases.undelivered) == ((), {MINER.public: 2})


@attack
async def test_of_a_crowd_of_pledges_a_few_are_selected_at_random():
    bench = Bench()
    admission = bench.run.authority.admission.model_copy(update={"miners": 4})
    bench.run = bench.run.model_copy(
        update={"authority": bench.run.authority.model_copy(update={"admission": admission})}
    )
    node = make_node(bench.run_id, bench.run, bench.store, MemoryStore(), Log("validator"), FIRST, clock=bench.clock)
    node = replace(node, beacon=VaryingBeacon())
    crowd = {samples.key(f"crowd {number}").public: 1 for number in range(40)}
    first = set((await read_window_cases(node, 2, crowd)).undelivered)
    second = set((await read_window_cases(node, 3, crowd)).undelivered)
    assert len(first) == len(second) == 4
    assert first != second


class VaryingBeacon:
    """A beacon whose rounds have different randomness."""

    async def randomness(self, round_number: int) -> bytes:
        """Implements Beacon.randomness."""
        return samples.digest(f"round {round_number}")
