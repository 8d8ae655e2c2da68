"""A node whose disk fills at any write of its state says so in one line, waits, and goes on where it was."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import zip_longest

import pytest
import trio

from grailnode.observe.ledger_check import verify_ledger
from protocol.errors import ProtocolError
from tests.support.faults.full_disk import DiskFill
from tests.support.simulation.faulty_network import CHECKER, TRAINER, FaultSchedule, FaultyNetwork
from tests.support.simulation.invariants import violations
from tests.support.simulation.network import key
from tests.support.simulation.virtual_clock import run_seeded

PROCESSES = (*TRAINER, "validator-0", "miner-1")
WINDOWS = 10
SECONDS = 3.0
"""For which the disk is full: one and a half windows."""
STEP = 3
"""Every third write has a run of its own, beside the last write of each kind."""


async def run_and_check(fills: Sequence[DiskFill]) -> tuple[FaultyNetwork, list[str]]:
    """Run a network in which nothing else fails; return it, and all violations of its invariants."""
    network = FaultyNetwork(FaultSchedule(keep_patches=2, fills=tuple(fills)))
    network.amend(scoring=network.run.scoring.model_copy(update={"windows": 3}))
    async with trio.open_nursery() as nursery:
        network.start_processes(nursery)
        await network.until_window(WINDOWS)
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
    network, lines = run_seeded(1, run_and_check, ())
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
    network, lines = run_seeded(1, run_and_check, fills)
    assert lines == [], fills
    assert network.failures == [], f"no process ends: {fills}"
    nodes = {fill.process.partition("/")[0] for fill in fills}
    assert {name for name, disk in network.disks.items() if disk.refusals} == nodes, fills
    processes = {fill.process for fill in fills}
    for name, log in network.logs.items():
        reports = log.named("disk-failing")
        assert len(reports) <= 1, fills
        assert len([item for item in log.named("waited") if item["waits_for"] == "disk"]) == len(reports), fills
        if name in processes:
            assert "no space left on the disk; this process waits" in reports[0]["error"], fills


@pytest.mark.slow
def test_a_disk_that_fills_at_a_write_of_any_kind_costs_nothing_but_time():
    trainer = [fill for process in TRAINER for fill in last_of_each_kind(process)]
    others = [fill for process in ("validator-0", "miner-1") for fill in last_of_each_kind(process)]
    for fills in zip_longest(trainer, others):
        check_full_disks(*filter(None, fills))


@pytest.mark.slow
@pytest.mark.parametrize("process", PROCESSES)
def test_a_disk_that_fills_at_every_third_write_costs_nothing_but_time(process: str):
    for number in range(0, len(writes()[process]), STEP):
        check_full_disks(DiskFill(process, number, SECONDS))
