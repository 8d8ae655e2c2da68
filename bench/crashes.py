"""kill -9 of real processes, at named points and at random times: `python -m bench.crashes --seeds 20 --random 500
--out DIR`.

One small network (a trainer's three processes, a validator, two miners, a beacon) lives through all of it in DIR. A
case starts one process with a trap at one point (bench/crash_points.py), waits until it is at work and then dead of it,
starts it again and measures how long it takes until it is at work again; that start bears the trap of the next case.
The seed of a case says how often the point passes before it kills. Every process dies again and again at its own
points, all at the same time. After that, every process is killed again and again after up to two seconds, and at last
all of them at once, one time in ten.

At the end, and between the three parts, the whole history is judged (bench/crash_audit.py). Cases that were done are
not done
again: start it again with the same DIR to go on. Prints a table by point; exits with 1 if anything was violated or took
longer than --within.
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

from bench.crash_audit import audit
from bench.crash_points import POINTS, Point, Trap
from bench.crash_site import PROCESSES, SIGNS, Site

TOGETHER = 10  # of so many random cases, one kills all processes at once
RANDOM, ALL = "at a random time", "all at once"


@dataclass(frozen=True)
class Case:
    """One kill and what came of it.

    Attributes:
        point: its name; RANDOM or ALL for those at random times.
        reached: whether the point was reached at all.
        seconds: from the start after the kill until the process was at work again.
    """

    point: str
    process: str
    seed: int
    reached: bool
    seconds: float


class Matrix:
    """The cases that were done, and those to do, in a network.

    Args:
        within: seconds in which a process must be at work again, and in which it must come to a point.
        until: when to begin no more cases, on the network's clock.
    """

    def __init__(self, site: Site, file: Path, within: float, until: float) -> None:
        self._site = site
        self._file = file
        self._within = within
        self._until = until
        self._lock = threading.Lock()
        lines = file.read_text().splitlines() if file.exists() else []
        self.cases = [Case(**json.loads(line)) for line in lines]
        self._done = {(case.point, case.seed) for case in self.cases}

    def named(self, seeds: int) -> None:
        """Every point with every seed, each process beside the others."""

        def lane(process: str) -> Callable[[], None]:
            kind = PROCESSES[process][1]
            alike = [name for name, (_, known) in PROCESSES.items() if known == kind]
            own = range(alike.index(process), seeds, len(alike))  # of several processes of a kind, the seed decides
            points = [point for point in POINTS if point.kind == kind]
            todo = [(point, seed) for seed in own for point in points if (point.name, seed) not in self._done]
            return lambda: self._die_at(process, todo)

        self._beside([lane(process) for process in SIGNS])

    def unnamed(self, kills: int) -> None:
        """Kills at random times: of every process beside the others, then of all at once."""
        numbers = [number for number in range(kills) if number % TOGETHER]

        def lane(place: int, process: str) -> Callable[[], None]:
            todo = [number for number in numbers[place :: len(SIGNS)] if (RANDOM, number) not in self._done]
            return lambda: self._die_any_time(process, todo)

        self._beside([lane(place, process) for place, process in enumerate(SIGNS)])
        for number in range(0, kills, TOGETHER):
            if (ALL, number) not in self._done and not self._over():
                self._site.wait(random.Random(f"{ALL} {number}").uniform(0.0, 2.0))
                for process in PROCESSES:
                    self._site.kill(process)
                self._note(Case(ALL, "all", number, True, self._site.revive(list(PROCESSES), self._within)))

    def _over(self) -> bool:
        return self._site.now() > self._until

    def _note(self, case: Case) -> None:
        with self._lock, self._file.open("a") as file:
            file.write(json.dumps(asdict(case)) + "\n")
            self.cases.append(case)
            if len(self.cases) % 50 == 0:
                print(f"{len(self.cases)} cases", flush=True)

    def _beside(self, lanes: list[Callable[[], None]]) -> None:
        threads = [threading.Thread(target=lane) for lane in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _die_at(self, process: str, todo: list[tuple[Point, int]]) -> None:
        """One process, through its points. It is at work when this begins and when it ends."""
        site, within = self._site, self._within
        last: tuple[Point, int, bool] | None = None

        def settle(seconds: float) -> None:
            if last is not None:
                self._note(Case(last[0].name, process, last[1], last[2], seconds))

        site.kill(process)
        for point, seed in todo:
            if self._over():
                break
            trap = Trap(point, 0 if point.at_start else _passes(point, seed), SIGNS[process])
            if point.at_start:
                settle(site.restart(process, None, within))
                site.kill(process)
                site.start(process, trap)
            else:
                settle(site.restart(process, trap, within))
            last = (point, seed, site.died(process, within))
            site.kill(process)
        settle(site.restart(process, None, within))

    def _die_any_time(self, process: str, todo: list[int]) -> None:
        for number in todo:
            if self._over():
                return
            self._site.wait(random.Random(f"{RANDOM} {number}").uniform(0.0, 2.0))
            self._site.kill(process)
            seconds = self._site.restart(process, None, self._within)
            self._note(Case(RANDOM, process, number, True, seconds))


def _passes(point: Point, seed: int) -> int:
    return random.Random(f"{point.name} {seed}").randrange(3)


def table(cases: Iterable[Case]) -> str:
    """A row for every point."""
    by_point: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_point[case.point].append(case)
    lines = [f"{'point':50} {'kills':>5} {'not reached':>11} {'median s':>8} {'longest s':>9}"]
    for point, found in by_point.items():
        seconds = sorted(case.seconds for case in found)
        reached = sum(case.reached for case in found)
        middle = seconds[len(seconds) // 2]
        lines.append(f"{point:50} {reached:5} {len(found) - reached:11} {middle:8.1f} {seconds[-1]:9.1f}")
    return "\n".join(lines)


def main() -> None:
    """Run what was not run yet, print, and fail on any violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--random", type=int, default=500, dest="kills")
    parser.add_argument("--within", type=float, default=30.0, help="seconds in which a process must be back at work")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no more cases after so many minutes")
    parser.add_argument("--out", type=Path, default=None, help="the network's directory and the results")
    arguments = parser.parse_args()
    out = arguments.out or Path(tempfile.mkdtemp(prefix="grailnode-crashes-"))
    found: list[str] = []
    with Site.open(out) as site:
        until = site.now() + 60.0 * arguments.minutes
        matrix = Matrix(site, out / "cases.jsonl", arguments.within, until)
        for part, count in ((matrix.named, arguments.seeds), (matrix.unnamed, arguments.kills)):
            part(count)
            site.settle()
            found += audit(site)
    report(matrix.cases, sorted(set(found)), arguments.within)
    print(f"the network lies in {out}")
    sys.exit(1 if found or any(case.seconds > arguments.within for case in matrix.cases) else 0)


def report(cases: list[Case], found: list[str], within: float) -> None:
    """Print the table, every violation, and the sums."""
    slow = [case for case in cases if case.seconds > within]
    print(table(cases))
    for line in found:
        print(f"violated: {line}")
    for case in slow:
        print(f"not back within {within:g} s: {case.process} after {case.point}, seed {case.seed}")
    kills = sum(case.reached for case in cases)
    print(f"{kills} kills, {len(found)} violations, {len(slow)} slow recoveries")


if __name__ == "__main__":
    main()
