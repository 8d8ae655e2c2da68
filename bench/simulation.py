"""Seeded simulations of a whole network on a virtual clock: `python -m bench.simulation --seeds 2000 --processes 2`.

Each seed gives faults of the storage and of the nodes' disks, cut links, ends of processes and an order of tasks
(tests/support/simulation). After each run the command checks all invariants (tests/support/simulation/invariants.py).
With `--dealing` there are four validators, and each group is dealt to one to three of them. `--twice N` runs the first
N seeds again, in other processes with another hash seed, and compares the traces. The command prints each violation,
then the sums, and exits with 1 on any violation or any difference between traces. A seed takes about 0.6 CPU seconds,
so 2,000 seeds take 10 minutes on two cores. The command needs the `test` extra.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from functools import partial

from tests.support.simulation.seeded_runs import SeedOutcome, run_seed, silence_beacon_log


def run_seeds(seeds: Iterable[int], processes: int, hash_seed: int, *, dealing: bool) -> dict[int, SeedOutcome]:
    """Run the simulations of some seeds, print violations as they occur, and return the outcomes by seed."""
    os.environ["PYTHONHASHSEED"] = str(hash_seed)  # the processes that are started from now on read it
    outcomes = {}
    with multiprocessing.get_context("spawn").Pool(processes, silence_beacon_log) as pool:
        for outcome in pool.imap_unordered(partial(run_seed, dealing=dealing), seeds, chunksize=4):
            outcomes[outcome.seed] = outcome
            for line in outcome.violations:
                print(f"seed {outcome.seed}: {line}", flush=True)
            if len(outcomes) % 100 == 0:
                print(f"{len(outcomes)} seeds", flush=True)
    return outcomes


def main() -> None:
    """Run the simulations, print, and exit with 1 on a violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--twice", type=int, default=100, help="seeds that run a second time")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="processes of the simulations")
    parser.add_argument("--dealing", action="store_true", help="four validators, among which R1 deals the groups")
    arguments = parser.parse_args()
    start = time.perf_counter()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    outcomes = run_seeds(seeds, arguments.processes, hash_seed=1, dealing=arguments.dealing)
    seconds = time.perf_counter() - start
    results = list(outcomes.values())
    violation_count = sum(bool(one.violations) for one in results)
    print(
        f"{len(results)} seeds in {seconds:.0f} s ({sum(one.seconds for one in results):.0f} s of CPU): "
        f"{sum(one.faults for one in results)} faults, {sum(one.crashes for one in results)} crashes, "
        f"{sum(one.versions for one in results)} versions, {sum(one.steps for one in results)} steps, "
        f"{sum(one.window_count for one in results)} miners' windows collected; {violation_count} seeds with violations"
    )
    repeated_seeds = seeds[: arguments.twice]
    repeated_outcomes = run_seeds(repeated_seeds, arguments.processes, hash_seed=2, dealing=arguments.dealing)
    equal_count = sum(repeated_outcomes[seed].trace == outcomes[seed].trace for seed in repeated_outcomes)
    print(f"same seed, same trace: {equal_count} of {len(repeated_outcomes)}")
    sys.exit(1 if violation_count or equal_count < len(repeated_outcomes) else 0)


if __name__ == "__main__":
    main()
