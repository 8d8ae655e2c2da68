"""Each trouble alone, and 200 pairs of them: `python -m bench.faults --pairs 200 --processes 2`.

First the troubles of storage, network, disk, clock and beacon: every run has the real roles over the stack of stores
that a node has, on a virtual clock (tests/support/simulation/stormy_network.py). Afterwards every rule of
tests/support/simulation/invariants.py is held against it, and that everybody works again. Prints, for each trouble, how
often it struck, what was still published, and by which events nodes said so.

Then those of HTTP and S3: a node's stores write, read, list and delete at a real `rclone serve s3` behind a proxy that
does to requests and answers what bad services and networks do (tests/support/faults/http_scenarios.py). Prints how many
exchanges it struck, how many operations ended in an error (one line each; the others were mended by trying again), and
how many answers the digest refused.

Pairs are printed where they violate anything. Exits with 1 if any did.
"""

import argparse
import itertools
import multiprocessing
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import trio

from grailnode.store.s3.s3_session import S3Credentials, S3Location, S3Session
from tests.support.faults.http_scenarios import HTTP_FAULTS, HttpOutcome, run_http_scenario
from tests.support.servers.rclone import serving
from tests.support.simulation.scenarios import TROUBLES
from tests.support.simulation.sweep import Outcome, outcome_in, quiet

Case = tuple[str, ...]

_LIVES_AT_ONCE = 6
_TOLD = 50  # cases between two lines that tell how far it is
_CREDENTIALS = S3Credentials("loopback-access", "loopback-secret")


def cases(names: Sequence[str], pairs: int) -> list[Case]:
    """Each name alone, and so many pairs of them."""
    singles: list[Case] = [(name,) for name in names]
    found: list[Case] = list(itertools.combinations(names, 2))
    return singles + random.Random(0).sample(found, min(pairs, len(found)))


def lived(case: Case) -> tuple[Case, Outcome]:
    """One run with the troubles of these names."""
    first, *others = [TROUBLES[name] for name in case]
    trouble = sum(others, first)
    return case, outcome_in(trouble.weather(seed=sorted(TROUBLES).index(case[0])))


def row(case: Case, found: Outcome) -> str:
    """A line of the first table."""
    told = ", ".join(f"{name} {count}" for name, count in found.told) or "nothing"
    outcome = "; ".join(found.violations) or "recovered"
    return f"{' + '.join(case):62} {found.faults:6} {found.versions:8} {found.collected:9}  {outcome}; said: {told}"


def http_row(case: Case, outcome: HttpOutcome) -> str:
    """A line of the second table."""
    example = f"; e.g. {outcome.errors[0].split(': ', 1)[-1][:90]}" if outcome.errors else ""
    result = "; ".join(outcome.violations) or "recovered"
    counts = f"{outcome.fault_count:6} {len(outcome.errors):8} {outcome.wrong_reads:9}"
    return f"{' + '.join(case):62} {counts}  {result}{example}"


def simulated(pairs: int, processes: int) -> int:
    """The first table; how many cases violated anything."""
    todo = cases(list(TROUBLES), pairs)
    print(f"{'trouble':62} {'struck':>6} {'versions':>8} {'collected':>9}  outcome", flush=True)
    violated = 0
    with multiprocessing.get_context("spawn").Pool(processes, quiet) as pool:
        for number, (case, found) in enumerate(pool.imap(lived, todo), 1):
            violated += bool(found.violations)
            if len(case) == 1 or found.violations:
                print(row(case, found), flush=True)
            if number % _TOLD == 0:
                print(f"{number} of {len(todo)} cases lived, {violated} with violations", flush=True)
    print(
        f"{len(TROUBLES)} troubles alone and {len(todo) - len(TROUBLES)} pairs: {violated} with violations", flush=True
    )
    return violated


async def over_http(pairs: int, url: str) -> int:
    """The second table; how many cases violated anything."""
    todo = cases(HTTP_FAULTS, pairs)
    location = S3Location("troubles", url, addressing="path")
    session = S3Session(location, _CREDENTIALS)
    session.client.create_bucket(Bucket=location.bucket)
    session.close()
    print(f"{'trouble':62} {'struck':>6} {'errors':>8} {'refused':>9}  outcome", flush=True)
    turns = enumerate(todo, 1)
    violated = 0

    async def live() -> None:
        nonlocal violated
        for number, case in turns:
            found = await run_http_scenario(location, _CREDENTIALS, case)
            violated += bool(found.violations)
            if len(case) == 1 or found.violations:
                print(http_row(case, found), flush=True)
            if number % _TOLD == 0:
                print(f"{number} of {len(todo)} cases lived, {violated} with violations", flush=True)

    async with trio.open_nursery() as nursery:
        for _ in range(_LIVES_AT_ONCE):
            nursery.start_soon(live)
    alone = len(HTTP_FAULTS)
    print(f"{alone} troubles over HTTP alone and {len(todo) - alone} pairs: {violated} with violations", flush=True)
    return violated


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    violated = simulated(arguments.pairs, arguments.processes)
    with tempfile.TemporaryDirectory(prefix="grailnode-faults-") as directory:
        buckets = Path(directory) / "buckets"
        buckets.mkdir()
        with serving(buckets, "--auth-key", f"{_CREDENTIALS.access_key},{_CREDENTIALS.secret_key}") as url:
            violated += trio.run(over_http, arguments.pairs, url)
    sys.exit(1 if violated else 0)


if __name__ == "__main__":
    main()
