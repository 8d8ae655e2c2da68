"""Recovery of real processes from kill -9, at named points and at random times: `python -m bench.crashes --out DIR`.

One small network (a trainer's three processes, a validator, two miners, a beacon) runs in DIR. In a case one process
kills itself at one point (bench/crash_points.py) once it works, and is started again; the case measures the seconds
until it works again, which it shows by an event in its log. The seed of a case says how often the process passes the
point before. All processes go through their own points at the same time. Then every process is killed again and again
after up to two seconds, and in one case of ten all of them are killed at once.

After each of the two parts the command checks the whole history for violations (bench/crash_audit.py). It prints a
table by point and exits with 1 on any violation and on any recovery that took longer than --within. Called again with
the same DIR, it continues with the cases that are missing. `--seeds 1 --random 10` takes 4 minutes on two cores, the
defaults about 90 minutes. The command needs nothing but the installed program.
"""

import argparse
import json
import random
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.crash_audit import find_violations
from bench.crash_points import POINTS, KillPlan, Point
from bench.crash_site import PROCESSES, READY_EVENTS, ProcessNetwork

KILL_ALL_INTERVAL = 10  # one random case of so many kills all processes at once
RANDOM, ALL = "at a random time", "all at once"


@dataclass(frozen=True)
class Case:
    """One kill and its result.

    Attributes:
        point: name of the point; RANDOM or ALL for kills at random times.
        process: name of the process; "all" if all were killed.
        seed: seed of the case.
        was_reached: whether the process has reached the point.
        seconds: time from the start after the kill until the process works again.
    """

    point: str
    process: str
    seed: int
    was_reached: bool
    seconds: float


class CrashCases:
    """Runs the cases in a network and records them.

    Args:
        network: the network at work.
        file: the file of the recorded cases, one JSON object a line.
        within: seconds in which a process must work again, and in which it must reach a point.
        until: time on the network's clock from which on no case begins.
    """

    def __init__(self, network: ProcessNetwork, file: Path, within: float, until: float) -> None:
        self._network = network
        self._file = file
        self._within = within
        self._until = until
        self._lock = threading.Lock()
        lines = file.read_text().splitlines() if file.exists() else []
        self.cases = [Case(**json.loads(line)) for line in lines]
        self._finished = {(case.point, case.seed) for case in self.cases}

    def kill_at_points(self, seeds: int) -> None:
        """Run the missing cases of every point, with seeds below `seeds`, a thread for each process."""

        def thread_work(process: str) -> Callable[[], None]:
            kind = PROCESSES[process][1]
            processes = [name for name, (_, other_kind) in PROCESSES.items() if other_kind == kind]
            # The seed says which of several processes of a kind is killed.
            seeds_of_process = range(processes.index(process), seeds, len(processes))
            points = [point for point in POINTS if point.kind == kind]
            pending = [
                (point, seed)
                for seed in seeds_of_process
                for point in points
                if (point.name, seed) not in self._finished
            ]
            return lambda: self._kill_at_points(process, pending)

        self._run_threads([thread_work(process) for process in READY_EVENTS])

    def kill_at_random_times(self, kills: int) -> None:
        """Run the missing cases with kills at random times: of each process in a thread, then of all at once."""
        numbers = [number for number in range(kills) if number % KILL_ALL_INTERVAL]

        def thread_work(place: int, process: str) -> Callable[[], None]:
            pending = [
                number for number in numbers[place :: len(READY_EVENTS)] if (RANDOM, number) not in self._finished
            ]
            return lambda: self._kill_at_random_times(process, pending)

        self._run_threads([thread_work(place, process) for place, process in enumerate(READY_EVENTS)])
        for number in range(0, kills, KILL_ALL_INTERVAL):
            if (ALL, number) not in self._finished and not self._is_time_over():
                self._network.wait(random.Random(f"{ALL} {number}").uniform(0.0, 2.0))
                for process in PROCESSES:
                    self._network.kill(process)
                self._record(
                    Case(ALL, "all", number, True, self._network.start_and_wait(list(PROCESSES), self._within))
                )

    def _is_time_over(self) -> bool:
        return self._network.now() > self._until

    def _record(self, case: Case) -> None:
        with self._lock, self._file.open("a") as file:
            file.write(json.dumps(asdict(case)) + "\n")
            self.cases.append(case)
            if len(self.cases) % 50 == 0:
                print(f"{len(self.cases)} cases", flush=True)

    def _run_threads(self, functions: list[Callable[[], None]]) -> None:
        threads = [threading.Thread(target=function) for function in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _kill_at_points(self, process: str, pending: list[tuple[Point, int]]) -> None:
        """Kill one process at its points. The process works when this function begins and when it ends."""
        network, within = self._network, self._within
        last_case: tuple[Point, int, bool] | None = None

        def record_last(seconds: float) -> None:
            if last_case is not None:
                self._record(Case(last_case[0].name, process, last_case[1], last_case[2], seconds))

        network.kill(process)
        for point, seed in pending:
            if self._is_time_over():
                break
            plan = KillPlan(point, 0 if point.at_start else _passes(point, seed), READY_EVENTS[process])
            if point.at_start:
                record_last(network.restart(process, None, within))
                network.kill(process)
                network.start(process, plan)
            else:
                record_last(network.restart(process, plan, within))
            last_case = (point, seed, network.wait_for_death(process, within))
            network.kill(process)
        record_last(network.restart(process, None, within))

    def _kill_at_random_times(self, process: str, pending: list[int]) -> None:
        for number in pending:
            if self._is_time_over():
                return
            self._network.wait(random.Random(f"{RANDOM} {number}").uniform(0.0, 2.0))
            self._network.kill(process)
            seconds = self._network.restart(process, None, self._within)
            self._record(Case(RANDOM, process, number, True, seconds))


def _passes(point: Point, seed: int) -> int:
    return random.Random(f"{point.name} {seed}").randrange(3)


def table(cases: Iterable[Case]) -> str:
    """Return the table, a row for each point."""
    by_point: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_point[case.point].append(case)
    lines = [f"{'point':50} {'kills':>5} {'not reached':>11} {'median s':>8} {'longest s':>9}"]
    for point, cases_of_point in by_point.items():
        seconds = sorted(case.seconds for case in cases_of_point)
        reached_count = sum(case.was_reached for case in cases_of_point)
        median = seconds[len(seconds) // 2]
        lines.append(
            f"{point:50} {reached_count:5} {len(cases_of_point) - reached_count:11} {median:8.1f} {seconds[-1]:9.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the missing cases, print, and exit with 1 on a violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="kills at each named point")
    parser.add_argument("--random", type=int, default=500, dest="kills", help="kills at random times")
    parser.add_argument("--within", type=float, default=30.0, help="seconds in which a process must work again")
    parser.add_argument("--minutes", type=float, default=1e9, help="minutes after which no case begins")
    parser.add_argument("--out", type=Path, default=None, help="directory of the network and the results")
    arguments = parser.parse_args()
    out = arguments.out or Path(tempfile.mkdtemp(prefix="grailnode-crashes-"))
    violations: list[str] = []
    with ProcessNetwork.open(out) as network:
        until = network.now() + 60.0 * arguments.minutes
        crash_cases = CrashCases(network, out / "cases.jsonl", arguments.within, until)
        for kill, count in (
            (crash_cases.kill_at_points, arguments.seeds),
            (crash_cases.kill_at_random_times, arguments.kills),
        ):
            kill(count)
            network.wait_for_open_windows()
            violations += find_violations(network)
    report(crash_cases.cases, sorted(set(violations)), arguments.within)
    print(f"the network's files are in {out}")
    sys.exit(1 if violations or any(case.seconds > arguments.within for case in crash_cases.cases) else 0)


def report(cases: list[Case], violations: list[str], within: float) -> None:
    """Print the table, every violation, and the sums."""
    slow = [case for case in cases if case.seconds > within]
    print(table(cases))
    for line in violations:
        print(f"violation: {line}")
    for case in slow:
        print(f"not at work within {within:g} s: {case.process} after {case.point}, seed {case.seed}")
    kills = sum(case.was_reached for case in cases)
    print(f"{kills} kills, {len(violations)} violations, {len(slow)} slow recoveries")


if __name__ == "__main__":
    main()
