"""Windows too small to show a cheat: its history refuses it long before its key is worth the deposit."""

import pytest
import trio

from bench.proofs.keys import Careless, Honest, mixed, packaged
from grailnode.run.creation import SCORING
from protocol.judging.verdict import Reason
from roles.miner.produce import Producer
from tests.support.adversaries.harness import Field, key
from tests.support.adversaries.miners import ANIMALS

DEPOSIT = round(SCORING.deposit)


@pytest.fixture(scope="module")
def loose() -> Field:
    """A run whose thresholds let bfloat16 pass."""
    return packaged(trio.run(mixed, 64))


def windows(field: Field, name: str, most: int = DEPOSIT) -> tuple[int, set[str]]:
    """Windows of one group until one is refused, and for what."""
    known: dict[str, Producer] = {"careless": Careless(field), "honest": Honest(field)}
    field.miner = key(f"history {name}")
    accepted, reasons = trio.run(field.windows_until_refused, known.get(name) or ANIMALS[name].at(field), most)
    return accepted, set(reasons)


@pytest.mark.parametrize("name", ["4-bit weights", "careless"])
def test_a_cheat_that_no_window_shows_is_refused_before_it_earns(loose: Field, name: str) -> None:
    accepted, reasons = windows(loose, name)
    assert 0 < accepted < DEPOSIT
    assert reasons == {Reason.HISTORY.value}


def test_honest_work_has_no_end(loose: Field) -> None:
    assert windows(loose, "honest", 2 * DEPOSIT) == (2 * DEPOSIT, set())
