"""Crowds of keys, ground so that they win the lottery for a reader's places: honest miners are seen all the same."""

import hashlib
from dataclasses import replace
from itertools import count, islice

import pytest
import trio

from protocol import limits
from protocol.identity.admission import draw_places, lottery
from protocol.identity.signing import SigningKey
from roles.participants import find_participants
from roles.validator.window_cases import read_window_cases
from tests.support.attacked_nodes.trainer import WINDOW
from tests.support.attacked_nodes.validator import PLEDGE, AttackedValidator
from tests.support.builders import samples
from tests.support.builders.chains import MINER
from tests.support.simulation.virtual_clock import simulated

CROWD = [samples.key(f"crowd {number}").public for number in range(400)]
HONEST = {samples.key(f"honest {number}").public for number in range(16)}


class VaryingBeacon:
    """A beacon whose rounds have different randomness."""

    async def randomness(self, round_number: int) -> bytes:
        return hashlib.sha256(f"round {round_number}".encode()).digest()


def ground_keys(salt: bytes, places: int, first: int = 1) -> list[SigningKey]:
    """Return keys that all come before MINER with a salt."""
    keys = (SigningKey(number.to_bytes(32, "big")) for number in count(first))
    return list(islice((key for key in keys if lottery(salt, key.public) < lottery(salt, MINER.public)), places))


@simulated
async def test_keys_ground_for_the_run_do_not_hide_a_miner_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PARTICIPANTS", 4)
    testbed = AttackedValidator()
    node = replace(testbed.validator, beacon=VaryingBeacon())
    for crowd_key in ground_keys(testbed.run_id, 8):
        await testbed.announce(crowd_key, expires_ms=1 << 50)
    await testbed.announce(expires_ms=1 << 50)
    sightings = 0
    for _ in range(40):
        await node.time.wait_for_newest_round()
        sightings += MINER.public in [item.key for item in await find_participants(node, "miner")]
        await trio.sleep(node.run.schedule.rounds * node.run.beacon.period_ms / 1000)
    assert 4 < sightings < 40  # of 9 keys, 4 are read each time


@simulated
async def test_keys_made_when_the_salt_was_out_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PARTICIPANTS", 4)
    testbed = AttackedValidator()
    node = replace(testbed.validator, beacon=VaryingBeacon())
    await node.time.wait_for_newest_round()
    await testbed.announce(expires_ms=1 << 50)
    await find_participants(node, "miner")
    for attempt in range(1, 10):
        await trio.sleep(node.run.schedule.rounds * node.run.beacon.period_ms / 1000)
        window = node.run.schedule.window_at(await node.time.wait_for_newest_round())
        salt = await node.time.randomness(node.run.schedule.opening(window))
        for crowd_key in ground_keys(salt, 8, 1000 * attempt):
            await testbed.announce(crowd_key, expires_ms=1 << 50)
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


@simulated
async def test_a_known_miner_has_a_place_in_every_window() -> None:
    testbed = AttackedValidator()
    admission = testbed.run.authority.admission.model_copy(update={"miners": 4})
    authority = testbed.run.authority.model_copy(update={"admission": admission})
    testbed.run = testbed.run.model_copy(update={"authority": authority})
    node = replace(testbed.validator, run=testbed.run, beacon=VaryingBeacon())
    pledges = dict.fromkeys([*CROWD[:40], MINER.public], PLEDGE)
    for window in range(WINDOW, WINDOW + 3):
        await node.time.wait_for_newest_round()
        cases = await read_window_cases(node, window, pledges, {MINER.public})
        assert MINER.public in cases.undelivered
