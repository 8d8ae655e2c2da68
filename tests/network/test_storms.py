"""Two hundred seeded lives of a network in a storm of faults, cuts and deaths; 2,000 more by `python -m
bench.simulation`.
"""

import os

import trio

from tests.support.simulation.seeded import run_seeded
from tests.support.simulation.sweep import outcome, sweep

SEEDS = (*range(200), 485, 641, 847, 922, 1839)
"""The last ones found something: miners that overslept, or whose first pledge took too long, and did not pledge anew;
clocks an hour ahead that, put right again, had nodes wait for what they had believed."""


def test_nothing_that_must_hold_is_violated_in_any_of_two_hundred_seeds():
    outcomes = list(sweep(SEEDS, processes=min(4, os.cpu_count() or 1)))
    assert len(outcomes) == len(SEEDS)
    assert {found.seed: found.violations for found in outcomes if found.violations} == {}
    # and the seeds are no idle ones
    assert sum(found.deaths > 0 for found in outcomes) > 50
    assert sum(found.faults > 10 for found in outcomes) > 50
    assert sum(found.versions > 1 for found in outcomes) > 150


def test_the_same_seed_gives_the_same_trace_and_another_seed_another():
    traces = {seed: outcome(seed).trace for seed in range(5)}
    assert {seed: outcome(seed).trace for seed in reversed(range(5))} == traces
    assert len(set(traces.values())) == 5


async def order_of_wakes() -> list[int]:
    """In which order eight tasks that are ready at once are run."""
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
