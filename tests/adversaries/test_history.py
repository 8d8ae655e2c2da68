"""Windows too small to show an adversary: its history refuses it before its key has worked off the deposit."""

import pytest
import trio

from grailnode.run.creation import SCORING
from protocol.judging.verdict import Reason
from roles.miner.produce import Producer
from tests.support.adversaries.harness import TrialHarness, key
from tests.support.adversaries.key_histories import (
    CachedHonestProducer,
    CarelessProducer,
    packaged_policy_harness,
)
from tests.support.adversaries.miners import ADVERSARIES
from tests.support.builders.proofs import BFLOAT16

DEPOSIT = round(SCORING.deposit)


@pytest.fixture(scope="module")
def harness() -> TrialHarness:
    """Return a harness of nodes in bfloat16."""
    return packaged_policy_harness(BFLOAT16)


def windows_until_refusal(harness: TrialHarness, name: str, max_windows: int = DEPOSIT) -> tuple[int, set[str]]:
    """Return how many windows of one group are accepted before the first refusal, and its reasons."""
    honest_producers: dict[str, Producer] = {
        "careless": CarelessProducer(harness),
        "honest": CachedHonestProducer(harness),
    }
    harness.miner = key(f"history {name}")
    accepted, reasons = trio.run(
        harness.windows_until_refusal, honest_producers.get(name) or ADVERSARIES[name].producer(harness), max_windows
    )
    return accepted, set(reasons)


@pytest.mark.parametrize("name", ["4-bit weights", "careless"])
def test_an_adversary_that_no_window_shows_is_refused_before_it_earns(harness: TrialHarness, name: str) -> None:
    """An edited token may be refused by its window already, where a calibration gives a small margin limit."""
    accepted, reasons = windows_until_refusal(harness, name)
    assert accepted < DEPOSIT
    assert reasons <= {Reason.HISTORY.value, Reason.SAMPLING.value}


def test_a_copy_of_the_policy_is_refused_by_its_history(harness: TrialHarness) -> None:
    accepted, reasons = windows_until_refusal(harness, "4-bit weights")
    assert accepted > 0
    assert reasons == {Reason.HISTORY.value}


def test_honest_work_is_never_refused(harness: TrialHarness) -> None:
    assert windows_until_refusal(harness, "honest", 2 * DEPOSIT) == (2 * DEPOSIT, set())
