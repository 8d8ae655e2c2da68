"""Seeded simulations of a network under storage faults, cut links, killed processes and full disks.

Every run takes three seeds, `pytest -m slow` takes 30, and `python -m bench.simulation` takes 2,000 more.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import zip_longest

import pytest
import trio

from grailnode.observe.ledger_check import verify_ledger
from protocol.errors import ProtocolError
from tests.support.faults.full_disk import DiskFill
from tests.support.pytest_options.few_daily import few_daily
from tests.support.simulation.faulty_network import CHECKER, SCENARIOS, TRAINER, FaultSchedule, FaultyNetwork
from tests.support.simulation.invariants import violations
from tests.support.simulation.network import key
from tests.support.simulation.seeded_runs import SeedOutcome, run_schedule, run_seed, silence_beacon_log
from tests.support.simulation.virtual_clock import run_seeded

SEEDS = range(0, 36, 12)


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
    assert run_seed(178, dealing=True).violations == ()  # a version lapses in it


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_beacon")
@pytest.mark.parametrize(("seeds", "dealing"), [(range(36, 63), False), (range(2, 8), True)], ids=["all", "dealing"])
def test_no_seed_of_many_violates_an_invariant(seeds: range, dealing: bool):
    check_outcomes([run_seed(seed, dealing) for seed in seeds])


@pytest.mark.usefixtures("quiet_beacon")
def test_the_same_seed_gives_the_same_trace_and_another_seed_another():
    one, other = SEEDS[:2]
    assert run_seed(one).trace == outcome_of(one).trace != outcome_of(other).trace


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


# A node whose disk fills at any write of its state says so in one line, waits, and goes on where it was


PROCESSES = (*TRAINER, "validator-0", "miner-1")
DISK_WINDOWS = 10
SECONDS = 3.0
"""For which the disk is full: one and a half windows."""


async def run_with_full_disks(fills: Sequence[DiskFill]) -> tuple[FaultyNetwork, list[str]]:
    """Run a network in which nothing else fails; return it, and all violations of its invariants."""
    network = FaultyNetwork(FaultSchedule(keep_patches=2, fills=tuple(fills)))
    network.amend(scoring=network.run.scoring.model_copy(update={"windows": 3}))
    async with trio.open_nursery() as nursery:
        network.start_processes(nursery)
        await network.until_window(DISK_WINDOWS)
        for disk in network.disks.values():
            await network.clock.sleep_until(disk.full_until + 2 * SECONDS)
        nursery.cancel_scope.cancel()
    lines = await violations(network)
    try:
        await verify_ledger(network.node(CHECKER), key("validator-0").public, lambda line: None)
    except ProtocolError as error:
        lines.append(f"ledger: {error}")
    return network, lines


@cache
def writes() -> dict[str, list[tuple[str, str]]]:
    """Return (operation, path) of the writes of each process in the first half of a network without faults."""
    network, lines = run_seeded(1, run_with_full_disks, ())
    assert lines == []
    all_writes = {process: network.context(process).state.writes for process in PROCESSES}
    return {process: items[: len(items) // 2] for process, items in all_writes.items()}


def last_of_each_kind(process: str) -> Iterator[DiskFill]:
    """Yield a full disk for the last write of each kind: of an operation on one folder."""
    numbers = {}
    for number, (operation, path) in enumerate(writes()[process]):
        numbers[operation, path.rpartition("/")[0] or path] = number
    for number in numbers.values():
        yield DiskFill(process, number, SECONDS)


def check_full_disks(*fills: DiskFill) -> None:
    """Run a network in which disks fill, and check what becomes of the nodes and of all data."""
    network, lines = run_seeded(1, run_with_full_disks, fills)
    assert lines == [], fills
    assert network.failures == [], f"no process ends: {fills}"
    nodes = {fill.process.partition("/")[0] for fill in fills}
    assert {name for name, disk in network.disks.items() if disk.refusals} == nodes, fills
    processes = {fill.process for fill in fills}
    for name, log in network.logs.items():
        reports = log.named("disk-failing")
        assert len(reports) <= sum(fill.process.partition("/")[0] == name.partition("/")[0] for fill in fills), fills
        assert len([item for item in log.named("waited") if item["waits_for"] == "disk"]) == len(reports), fills
        if name in processes:
            assert "no space left on the disk; this process waits" in reports[0]["error"], fills


@pytest.mark.slow
def test_a_disk_that_fills_at_a_write_of_any_kind_costs_nothing_but_time():
    """In each run one write of the training process, one of another process of the trainer, and one of another node."""
    training, upload, download, validator, miner = (list(last_of_each_kind(process)) for process in PROCESSES)
    for fills in zip_longest(training, upload + download, validator + miner):
        check_full_disks(*filter(None, fills))
