"""Each trouble alone, and 200 pairs of them: `python -m bench.faults --pairs 200 --processes 2`.

Every run has the real roles over the stack of stores that a node has, on a virtual clock (tests/network/storm.py). Afterwards
every rule of DESIGN.md section 1 is held against it, and that everybody works again. Prints, for each trouble, how often it
struck, what was still published, and by which events nodes said so; then the pairs that violated anything. Exits with 1 if any did.
"""

import argparse
import itertools
import multiprocessing
import os
import random
import sys

from tests.network.sweep import Outcome, outcome_in, quiet
from tests.network.troubles import TROUBLES


def lived(case: tuple[str, ...]) -> tuple[tuple[str, ...], Outcome]:
    """One run with the troubles of these names."""
    first, *others = [TROUBLES[name] for name in case]
    trouble = sum(others, first)
    return case, outcome_in(trouble.weather(seed=sorted(TROUBLES).index(case[0])))


def row(case: tuple[str, ...], found: Outcome) -> str:
    """A line of the table."""
    told = ", ".join(f"{name} {count}" for name, count in found.told) or "nothing"
    outcome = "; ".join(found.violations) or "recovered"
    return f"{' + '.join(case):62} {found.faults:6} {found.versions:8} {found.collected:9}  {outcome}; said: {told}"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    singles = [(name,) for name in TROUBLES]
    pairs = random.Random(0).sample(list(itertools.combinations(TROUBLES, 2)), arguments.pairs)
    print(f"{'trouble':62} {'struck':>6} {'versions':>8} {'collected':>9}  outcome", flush=True)
    violated = 0
    with multiprocessing.get_context("spawn").Pool(arguments.processes, quiet) as pool:
        for case, found in pool.imap(lived, singles + pairs):
            violated += bool(found.violations)
            if len(case) == 1 or found.violations:
                print(row(case, found), flush=True)
    print(f"{len(singles)} troubles alone and {len(pairs)} pairs: {violated} with violations")
    sys.exit(1 if violated else 0)


if __name__ == "__main__":
    main()
