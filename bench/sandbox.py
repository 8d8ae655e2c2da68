"""The time of a trial and of a plug-in's step in the sandbox, by number of threads: `python -m bench.sandbox`.

A trial runs the reference solution of a programming problem against its tests in bubblewrap. For each number of threads
the command prints the milliseconds of a trial, which are the time of 100 trials over 100, and how many trials passed.

A step is one reward of the guide's plug-in (docs/guide/own-task.md), each in a fresh fork: the command prints the mean
of 1,000 steps, and for one thread the processor time, and the median and the least time of the parts of a step. On two
idle cores it takes half a minute. It needs Linux with bubblewrap and the `test` extra.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from grailnode.environments.plugin_environment import PluginEnvironment
from grailnode.sandbox import BubblewrapSandbox
from grailnode.sandbox.plugin_sandbox import PluginSandbox
from protocol.environments.base import ProgramResult
from protocol.environments.programming import Programming, program_tests
from tests.support.builders.plugins import files_of_page, install
from tests.support.builders.tasks import CODE, OWN

TRIALS = 100
STEPS = 1000


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
    with tempfile.TemporaryDirectory() as directory:
        plugin = PluginSandbox(sandbox, [install(files_of_page(), Path(directory))], "doubled-digits", b"{}")
        _measure_steps(plugin)
        plugin.close()


def _measure_steps(plugin: PluginSandbox) -> None:
    environment = PluginEnvironment("doubled-digits", plugin)
    problem = environment.held_out_problem(0)
    for threads in (1, 2, 4):
        start = time.monotonic()
        with ThreadPoolExecutor(threads) as pool:
            right = sum(pool.map(lambda _: environment.reward(problem, "34"), range(STEPS)))
        print(f"{threads} threads: {1000 * (time.monotonic() - start) / STEPS:.2f} ms a step, {right:.0f} right")
    start = _processor_seconds(plugin)
    for _ in range(STEPS):
        environment.reward(problem, "34")
    middle = _processor_seconds(plugin)
    moments = []
    for _ in range(STEPS):
        one = [time.monotonic()]
        session, _ = plugin.start("reward", json.loads(problem.reference), "34")
        one.append(time.monotonic())
        session.call("reward", json.loads(problem.reference), "34")
        one.append(time.monotonic())
        session.close()
        moments.append([*one, time.monotonic()])
    spent = middle - start, _processor_seconds(plugin) - middle
    first, both = (f"{1000 * seconds / STEPS:.2f} ms" for seconds in spent)
    print(f"processor time in the sandbox: {first} a step, {both} with another call in the same fork")
    for place, part in enumerate(("a fork and its first call", "another call", "the end of the fork")):
        times = [1000 * (one[place + 1] - one[place]) for one in moments]
        print(f"{part}: median {statistics.median(times):.2f} ms, least {min(times):.2f} ms")


def _processor_seconds(plugin: PluginSandbox) -> float:
    """Return the processor time of the process that forks, with that of all its forks that have ended."""
    host = plugin._host
    assert host is not None
    bubblewrap = host._process.pid
    (child,) = Path(f"/proc/{bubblewrap}/task/{bubblewrap}/children").read_text().split()
    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
