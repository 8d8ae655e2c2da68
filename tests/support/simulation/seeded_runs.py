"""Runs networks with the faults of a seed or of a schedule, and says what became of them."""

import logging
import time
from collections import Counter
from dataclasses import dataclass

import torch

from tests.support.simulation.faulty_network import FaultSchedule, FaultyNetwork, run_network
from tests.support.simulation.invariants import violations
from tests.support.simulation.virtual_clock import run_seeded


@dataclass(frozen=True)
class SeedOutcome:
    """The outcome of a network with the faults of one seed.

    Attributes:
        trace: digest of all events and puts.
        violations: a line for each violation of an invariant.
        faults: number of injected faults, those of the nodes' own disks included.
        crashes: number of restarts of processes after crashes and failures.
        versions, steps, window_count: numbers of published versions, training steps, and collected miners' windows.
        error_events: numbers of events with an error, by name.
        seconds: CPU time.
    """

    seed: int
    trace: str
    violations: tuple[str, ...]
    faults: int
    crashes: int
    versions: int
    steps: int
    window_count: int
    error_events: tuple[tuple[str, int], ...]
    seconds: float


async def _run_and_check(fault_schedule: FaultSchedule) -> tuple[FaultyNetwork, str, list[str]]:
    network = await run_network(fault_schedule)
    return network, network.trace(), await violations(network)


def silence_beacon_log() -> None:
    """Log no false rounds in this process: the simulated relays serve them all the time."""
    logging.getLogger("grailnode").setLevel(logging.ERROR)


def run_seed(seed: int, dealing: bool = False) -> SeedOutcome:
    """Run the network of a seed, and check its invariants.

    Args:
        dealing: whether R1 deals the groups to some of four validators.
    """
    return run_schedule(FaultSchedule.of(seed, dealing=dealing))


def run_schedule(fault_schedule: FaultSchedule) -> SeedOutcome:
    """Run a network with the faults of a schedule, and check its invariants."""
    torch.set_num_threads(1)
    start_time = time.process_time()
    network, trace, lines = run_seeded(fault_schedule.seed, _run_and_check, fault_schedule)
    error_events = Counter(name for log in network.logs.values() for name, fields in log.events if "error" in fields)
    error_events.update({"restarted": len(network.failures)} if network.failures else {})
    return SeedOutcome(
        seed=fault_schedule.seed,
        trace=trace,
        violations=tuple(lines),
        faults=sum(len(context.shared_store.trace) + len(context.disk.trace) for context in network.contexts.values()),
        crashes=len(network.crashed_processes) + len(network.failures),
        versions=len(network.events("trainer/upload", "published")),
        steps=len(network.events("trainer/training", "step")),
        window_count=len(network.events("trainer/download", "collected")),
        error_events=tuple(sorted(error_events.items())),
        seconds=time.process_time() - start_time,
    )
