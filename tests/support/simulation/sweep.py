"""Many seeds, several processes: what became of each."""

import logging
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from tests.support.simulation.invariants import violations
from tests.support.simulation.seeded import run_seeded
from tests.support.simulation.stormy_network import StormyNetwork, Weather, live


@dataclass(frozen=True)
class Outcome:
    """One seed's life.

    Attributes:
        trace: a digest of everything that happened in it.
        violations: of what must always hold, one line each.
        faults: injected, those of the nodes' own disks included; deaths: of processes, and ends that a supervisor
            mended.
        versions, steps, collected: published, taken, and miners' windows settled.
        told: events by which nodes said that something was wrong, by name.
        seconds: of CPU time.
    """

    seed: int
    trace: str
    violations: tuple[str, ...]
    faults: int
    deaths: int
    versions: int
    steps: int
    collected: int
    told: tuple[tuple[str, int], ...]
    seconds: float


async def _live_and_judge(weather: Weather) -> tuple[StormyNetwork, str, list[str]]:
    network = await live(weather)
    return network, network.trace(), await violations(network)


def quiet() -> None:
    """Let this process not tell of false rounds: the beacon's relays lie all the time here."""
    logging.getLogger("grailnode").setLevel(logging.ERROR)


def outcome(seed: int) -> Outcome:
    """Live through a seed and judge it."""
    return outcome_in(Weather.of(seed))


def outcome_in(weather: Weather) -> Outcome:
    """Live through a weather and judge it."""
    torch.set_num_threads(1)
    began = time.process_time()
    network, trace, found = run_seeded(weather.seed, _live_and_judge, weather)
    told = Counter(name for log in network.logs.values() for name, fields in log.events if "error" in fields)
    told.update({"restarted": len(network.failed)} if network.failed else {})
    return Outcome(
        seed=weather.seed,
        trace=trace,
        violations=tuple(found),
        faults=sum(len(life.storm.trace) + len(life.disk.trace) for life in network.lives.values()),
        deaths=len(network.died) + len(network.failed),
        versions=len(network.events("trainer/upload", "published")),
        steps=len(network.events("trainer/training", "step")),
        collected=len(network.events("trainer/download", "collected")),
        told=tuple(sorted(told.items())),
        seconds=time.process_time() - began,
    )


def sweep(seeds: Iterable[int], processes: int) -> Iterator[Outcome]:
    """The outcomes of seeds, as they come."""
    with multiprocessing.get_context("spawn").Pool(processes, quiet) as pool:
        yield from pool.imap_unordered(outcome, seeds, chunksize=4)
