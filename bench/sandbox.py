"""The time of a trial in the sandbox, with one, two and four threads: `python -m bench.sandbox`.

A trial runs the reference solution of a programming problem against its tests in bubblewrap. For each number of threads
the command prints the milliseconds of a trial, which are the time of 100 trials over 100, and how many trials passed.
It takes half a minute, and needs Linux with bubblewrap and the `test` extra.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor

from grailnode.sandbox import BubblewrapSandbox
from protocol.environments.base import ProgramResult
from protocol.environments.programming import Programming, program_tests
from tests.support.builders.tasks import CODE, OWN

TRIALS = 100


def main() -> None:
    """Print the milliseconds of a trial, by number of threads."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    sandbox = BubblewrapSandbox.open(OWN)
    tasks = [program_tests(problem) for problem in Programming(CODE, sandbox).problems]

    def attempt(number: int) -> ProgramResult:
        task = tasks[number % len(tasks)]
        return sandbox.attempt(task, task.reference)

    for threads in (1, 2, 4):
        start = time.monotonic()
        with ThreadPoolExecutor(threads) as pool:
            pass_count = sum(all(trial.passes) for trial in pool.map(attempt, range(TRIALS)))
        seconds = (time.monotonic() - start) / TRIALS
        print(f"{threads} threads: {1000 * seconds:.0f} ms a trial, {pass_count} of {TRIALS} trials passed")


if __name__ == "__main__":
    main()
