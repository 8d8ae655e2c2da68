"""Recovery from each fault alone and from pairs of faults: `python -m bench.faults --pairs 200 --processes 2`.

The first table has the faults of storage, network, disk, clock and beacon. Each run has the real roles over the stores
of a node, on a virtual clock (tests/support/simulation). After the fault the command checks all invariants
(tests/support/simulation/invariants.py) and that every role works again. A row says how often the fault occurred, how
many versions were published, how many windows of miners were collected, and which events the nodes have logged.

The second table has the faults of HTTP and S3: a node's stores write, read, list and delete at a real `rclone serve s3`
behind a proxy that injects what bad services and networks do (tests/support/faults/http_scenarios.py). A row says how
many exchanges were affected, how many operations ended in an error after all retries, and how many answers the digest
refused.

Pairs have a row only if they violate an invariant; then the command exits with 1. All faults alone take a minute on two
cores, 200 pairs in each table about 8 minutes. The command needs rclone (the `test` extra).
"""

import argparse
import itertools
import multiprocessing
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import trio

from grailnode.store.place import PlaceSection
from grailnode.store.s3.s3_session import S3Credentials, S3Session
from tests.support.faults.http_scenarios import HTTP_FAULTS, HttpOutcome, run_http_scenario
from tests.support.servers.rclone import serving
from tests.support.simulation.faulty_network import SCENARIOS
from tests.support.simulation.seeded_runs import SeedOutcome, run_schedule, silence_beacon_log

Case = tuple[str, ...]

_CONCURRENT_CASES = 6
_PROGRESS_INTERVAL = 50  # cases between two lines that tell how far it is
_CREDENTIALS = S3Credentials("loopback-access", "loopback-secret")


def cases(names: Sequence[str], pairs: int) -> list[Case]:
    """Return each name alone, and `pairs` pairs of them that are drawn with a fixed seed."""
    singles: list[Case] = [(name,) for name in names]
    pairs_of_names: list[Case] = list(itertools.combinations(names, 2))
    return singles + random.Random(0).sample(pairs_of_names, min(pairs, len(pairs_of_names)))


def run_case(case: Case) -> tuple[Case, SeedOutcome]:
    """Simulate one run with the faults of these names."""
    first_fault, *other_faults = [SCENARIOS[name] for name in case]
    schedule = sum(other_faults, first_fault)
    return case, run_schedule(replace(schedule, seed=sorted(SCENARIOS).index(case[0])))


def row(case: Case, outcome: SeedOutcome) -> str:
    """Return a row of the first table."""
    events = ", ".join(f"{name} {count}" for name, count in outcome.error_events) or "nothing"
    result = "; ".join(outcome.violations) or "recovered"
    counts = f"{outcome.faults:6} {outcome.versions:8} {outcome.window_count:9}"
    return f"{' + '.join(case):62} {counts}  {result}; logged: {events}"


def http_row(case: Case, outcome: HttpOutcome) -> str:
    """Return a row of the second table."""
    example = f"; e.g. {outcome.errors[0].split(': ', 1)[-1][:90]}" if outcome.errors else ""
    result = "; ".join(outcome.violations) or "recovered"
    counts = f"{outcome.fault_count:6} {len(outcome.errors):8} {outcome.wrong_reads:9}"
    return f"{' + '.join(case):62} {counts}  {result}{example}"


def run_simulations(pairs: int, processes: int) -> int:
    """Print the first table and return the number of cases with violations."""
    all_cases = cases(list(SCENARIOS), pairs)
    print(f"{'fault':62} {'faults':>6} {'versions':>8} {'collected':>9}  outcome", flush=True)
    violation_count = 0
    with multiprocessing.get_context("spawn").Pool(processes, silence_beacon_log) as pool:
        for number, (case, outcome) in enumerate(pool.imap(run_case, all_cases), 1):
            violation_count += bool(outcome.violations)
            if len(case) == 1 or outcome.violations:
                print(row(case, outcome), flush=True)
            if number % _PROGRESS_INTERVAL == 0:
                print(f"{number} of {len(all_cases)} cases, {violation_count} with violations", flush=True)
    print(
        f"{len(SCENARIOS)} faults alone and {len(all_cases) - len(SCENARIOS)} pairs: {violation_count} with violations",
        flush=True,
    )
    return violation_count


async def run_http_scenarios(pairs: int, url: str) -> int:
    """Print the second table and return the number of cases with violations.

    Args:
        pairs: number of pairs.
        url: URL of the S3 service.
    """
    all_cases = cases(HTTP_FAULTS, pairs)
    place = PlaceSection(kind="s3", bucket="faults", endpoint=url, addressing="path")
    session = S3Session(place, _CREDENTIALS)
    session.client.create_bucket(Bucket=place.bucket)
    session.close()
    print(f"{'fault':62} {'faults':>6} {'errors':>8} {'refused':>9}  outcome", flush=True)
    numbered_cases = enumerate(all_cases, 1)
    violation_count = 0

    async def run_cases() -> None:
        nonlocal violation_count
        for number, case in numbered_cases:
            outcome = await run_http_scenario(place, _CREDENTIALS, case)
            violation_count += bool(outcome.violations)
            if len(case) == 1 or outcome.violations:
                print(http_row(case, outcome), flush=True)
            if number % _PROGRESS_INTERVAL == 0:
                print(f"{number} of {len(all_cases)} cases, {violation_count} with violations", flush=True)

    async with trio.open_nursery() as nursery:
        for _ in range(_CONCURRENT_CASES):
            nursery.start_soon(run_cases)
    single_count = len(HTTP_FAULTS)
    print(
        f"{single_count} faults over HTTP alone and {len(all_cases) - single_count} pairs: "
        f"{violation_count} with violations",
        flush=True,
    )
    return violation_count


def main() -> None:
    """Print both tables and exit with 1 on a violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200, help="pairs of faults in each table")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="processes of the simulations")
    arguments = parser.parse_args()
    violation_count = run_simulations(arguments.pairs, arguments.processes)
    with tempfile.TemporaryDirectory(prefix="grailnode-faults-") as directory:
        buckets = Path(directory) / "buckets"
        buckets.mkdir()
        with serving(buckets, "--auth-key", f"{_CREDENTIALS.access_key},{_CREDENTIALS.secret_key}") as url:
            violation_count += trio.run(run_http_scenarios, arguments.pairs, url)
    sys.exit(1 if violation_count else 0)


if __name__ == "__main__":
    main()
