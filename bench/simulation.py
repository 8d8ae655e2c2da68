"""Seeded lives of a network on a virtual clock: `python -m bench.simulation --seeds 2000 --processes 2`.

Each seed brings its own faults of the storage and of the nodes' disks, cut links, deaths of processes and order of
tasks (tests/support/simulation/stormy_network.py); afterwards every rule of tests/support/simulation/invariants.py is
held against what really happened. `--twice N` lives the first N seeds again, in other processes with another hash seed,
and compares the traces. Prints each violation, then the sums; exits with 1 if there was any.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable

from tests.support.simulation.sweep import Outcome, sweep


def lived(seeds: Iterable[int], processes: int, hash_seed: int) -> dict[int, Outcome]:
    """The outcomes by seed; violations are printed as they come."""
    os.environ["PYTHONHASHSEED"] = str(hash_seed)  # of the processes that are started now
    outcomes = {}
    for found in sweep(seeds, processes):
        outcomes[found.seed] = found
        for line in found.violations:
            print(f"seed {found.seed}: {line}", flush=True)
        if len(outcomes) % 100 == 0:
            print(f"{len(outcomes)} seeds lived", flush=True)
    return outcomes


def main() -> None:
    """Run, print, and fail if anything that must hold was violated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--twice", type=int, default=100)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    began = time.perf_counter()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    outcomes = lived(seeds, arguments.processes, hash_seed=1)
    seconds = time.perf_counter() - began
    found = list(outcomes.values())
    violated = sum(bool(one.violations) for one in found)
    print(
        f"{len(found)} seeds in {seconds:.0f} s ({sum(one.seconds for one in found):.0f} s of CPU): "
        f"{sum(one.faults for one in found)} faults, {sum(one.deaths for one in found)} deaths, "
        f"{sum(one.versions for one in found)} versions, {sum(one.steps for one in found)} steps, "
        f"{sum(one.collected for one in found)} windows of miners collected; {violated} seeds with violations"
    )
    again = lived(seeds[: arguments.twice], arguments.processes, hash_seed=2)
    same = sum(again[seed].trace == outcomes[seed].trace for seed in again)
    print(f"same seed, same trace: {same} of {len(again)}")
    sys.exit(1 if violated or same < len(again) else 0)


if __name__ == "__main__":
    main()
