"""Windows too small to show an adversary: they refuse it together before its key has worked off the deposit."""

import pytest
import trio

from grailnode.run.rules import Rules
from protocol.judging.verdict import Reason
from tests.support.adversaries.harness import TrialHarness, key
from tests.support.adversaries.key_histories import careless_producers, packaged_policy_harness
from tests.support.adversaries.miners import ADVERSARIES
from tests.support.builders.proofs import BFLOAT16

DEPOSIT = round(Rules().deposit)


@pytest.fixture(scope="module")
def harness() -> TrialHarness:
    """Return a harness of nodes in bfloat16."""
    return packaged_policy_harness(BFLOAT16)


def windows_until_refusal(
    harness: TrialHarness, name: str, max_windows: int = DEPOSIT, number: int = 0
) -> tuple[int, set[str]]:
    """Return how many windows of one group of a key are accepted before the first refusal, and its reasons."""
    harness.miner = key(f"history {name} {number}")
    producer = careless_producers(harness).get(name) or ADVERSARIES[name].producer(harness)
    accepted, reasons = trio.run(harness.windows_until_refusal, producer, max_windows)
    return accepted, set(reasons)


@pytest.mark.parametrize(("name", "most"), [("one token in 20", 0), ("one token in 100", DEPOSIT - 1)])
def test_replaced_tokens_are_refused_by_how_far_they_fall_short(harness: TrialHarness, name: str, most: int) -> None:
    """A token that replaces another is far from a tie, as this policy is sure of most tokens."""
    outcomes = [windows_until_refusal(harness, name, number=number) for number in range(8)]
    assert all(accepted <= most for accepted, _ in outcomes)
    assert all(reasons <= {Reason.SAMPLING.value, Reason.WINDOW.value} for _, reasons in outcomes)


def test_an_adversary_is_refused_by_all_its_windows_before_it_earns(harness: TrialHarness) -> None:
    """A group alone refuses a key, or else its windows together do."""
    outcomes = [windows_until_refusal(harness, "4-bit weights", number=number) for number in range(8)]
    assert all(accepted < DEPOSIT for accepted, _ in outcomes)
    assert all(reasons <= {Reason.SKETCH.value, Reason.WINDOW.value} for _, reasons in outcomes)
    assert any(reasons == {Reason.SKETCH.value} for _, reasons in outcomes)


def test_honest_work_is_never_refused(harness: TrialHarness) -> None:
    assert windows_until_refusal(harness, "honest", 2 * DEPOSIT) == (2 * DEPOSIT, set())
