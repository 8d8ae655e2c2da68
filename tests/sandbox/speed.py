"""Measure how long a trial takes on this machine: `python -m tests.sandbox.speed`."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

from grailnode.sandbox import BubblewrapSandbox
from protocol.environments.base import ProgramResult
from protocol.environments.programming import Programming, program_tests
from tests.sandbox.conftest import OWN
from tests.support.builders.tasks import CODE

TRIALS = 100


def main() -> None:
    """Print milliseconds for each trial, by number of threads."""
    sandbox = BubblewrapSandbox.open(OWN)
    tasks = [program_tests(problem) for problem in Programming(CODE, sandbox).problems]

    def attempt(number: int) -> ProgramResult:
        task = tasks[number % len(tasks)]
        return sandbox.attempt(task, task.reference)

    for threads in (1, 2, 4):
        start = time.monotonic()
        with ThreadPoolExecutor(threads) as pool:
            passed_count = sum(all(trial.passes) for trial in pool.map(attempt, range(TRIALS)))
        seconds = (time.monotonic() - start) / TRIALS
        sys.stdout.write(
            f"{threads} threads: {1000 * seconds:.0f} ms a trial, {passed_count} of {TRIALS} passed_count\n"
        )


if __name__ == "__main__":
    main()
