"""Seeded simulations of a network under storage faults, cut links and killed processes.

Every run takes six seeds, `pytest -m slow` takes 66, and `python -m bench.simulation` takes 2,000 more.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest
import trio

from tests.support.pytest_options.few_daily import few_daily
from tests.support.simulation.scenarios import SCENARIOS
from tests.support.simulation.sweep import SeedOutcome, run_schedule, run_seed, silence_beacon_log, sweep
from tests.support.simulation.virtual_clock import run_seeded

SEEDS = range(0, 36, 12)
OTHER_SEEDS = [seed for seed in range(66) if seed not in SEEDS]


@pytest.fixture
def quiet_beacon() -> Iterator[None]:
    """Log no false rounds: the simulated relays serve them all the time."""
    logger = logging.getLogger("grailnode")
    level = logger.level
    silence_beacon_log()
    yield
    logger.setLevel(level)


outcome_of = cache(run_seed)


def check_outcomes(outcomes: Sequence[SeedOutcome]) -> None:
    """Check that no seed violated an invariant, and that enough of them had faults, crashes and new versions."""
    assert {item.seed: item.violations for item in outcomes if item.violations} == {}
    assert sum(item.crashes > 0 for item in outcomes) > 0.24 * len(outcomes)
    assert sum(item.faults > 10 for item in outcomes) > 0.24 * len(outcomes)
    assert sum(item.versions > 1 for item in outcomes) > 0.5 * len(outcomes)


@pytest.mark.usefixtures("quiet_beacon")
def test_no_seed_violates_an_invariant():
    check_outcomes([outcome_of(seed) for seed in SEEDS])


@pytest.mark.slow
def test_no_seed_of_many_violates_an_invariant():
    outcomes = list(sweep(OTHER_SEEDS, processes=min(4, os.cpu_count() or 1)))
    assert len(outcomes) == len(OTHER_SEEDS)
    check_outcomes(outcomes)


@pytest.mark.usefixtures("quiet_beacon")
def test_no_seed_of_a_network_that_deals_its_groups_violates_an_invariant():
    assert run_seed(178, dealing=True).violations == ()  # a version lapses in it


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_beacon")
def test_no_seed_of_many_networks_that_deal_their_groups_violates_an_invariant():
    check_outcomes([run_seed(seed, dealing=True) for seed in range(2, 11)])


@pytest.mark.usefixtures("quiet_beacon")
def test_the_same_seed_gives_the_same_trace_and_another_seed_another():
    one, other = SEEDS[:2]
    assert run_seed(one).trace == outcome_of(one).trace != outcome_of(other).trace


async def order_of_wakes() -> list[int]:
    """Return the order in which eight tasks run that become ready at the same moment."""
    order: list[int] = []

    async def wake(number: int) -> None:
        await trio.sleep(1)
        order.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(wake, number)
    return order


def test_the_seed_decides_which_of_the_ready_tasks_runs_first():
    orders = [tuple(run_seeded(seed, order_of_wakes)) for seed in range(10)]
    assert [tuple(run_seeded(seed, order_of_wakes)) for seed in range(10)] == orders
    assert len(set(orders)) > 5


# A network recovers from each fault alone; `python -m bench.faults` runs pairs of them


@pytest.mark.parametrize("name", few_daily(SCENARIOS, 9))
def test_a_network_recovers_from_a_single_fault(name: str):
    outcome = run_schedule(SCENARIOS[name])
    assert outcome.violations == ()
    assert outcome.versions >= 1
    assert outcome.window_count >= 1


def test_verdicts_are_read_often_enough_although_a_wrong_clock_leaves_little_time():
    flipped_bit, fast_clock = SCENARIOS["storage: one bit differs"], SCENARIOS["clock: everybody's an hour fast"]
    assert run_schedule(replace(flipped_bit + fast_clock, seed=29)).violations == ()
