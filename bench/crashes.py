"""kill -9 of real processes, at named points and at random times: `python -m bench.crashes --seeds 20 --random 500 --out DIR`.

One small network (a trainer's three processes, a validator, two miners, a beacon) lives through all of it in DIR. A case starts one
process with a trap at one point (bench/crash_points.py), waits until it is dead, starts it again and measures how long
it takes until it has done its work again. The seed of a case says how often the point passes before it kills. Random
cases kill one process, and now and then all of them at once, after up to two seconds.

Every 20 cases and at the end the whole history is judged (bench/crash_audit.py). Cases that were done are not done again: start it
again with the same DIR to go on. Prints a table by point; exits with 1 if anything was violated or took longer than --within.
"""

import argparse
import json
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.crash_audit import audit
from bench.crash_points import POINTS, Point, Trap
from bench.crash_site import Site


@dataclass(frozen=True)
class Case:
    """One kill and what came of it.

    Attributes:
        point: its name; 'random' or 'all at once' for those at random times.
        reached: whether the point was reached at all.
        seconds: from the start after the kill until the process had done its work again.
    """

    point: str
    process: str
    seed: int
    reached: bool
    seconds: float


def run_point(site: Site, point: Point, seed: int, within: float) -> Case:
    """Kill a process at a point."""
    process = site.process_of(point.kind, seed)
    passes = random.Random(f"{point.name} {seed}").randrange(3) if "epoch" not in point.name else 0
    site.stop(process)
    site.start(process, Trap(point, passes))
    reached = site.died(process, within)
    if not reached:
        site.stop(process)
    return Case(point.name, process, seed, reached, site.revive([process], within))


def run_random(site: Site, seed: int, within: float) -> Case:
    """Kill a process, or all of them, at a random time."""
    chance = random.Random(f"random {seed}")
    everything = chance.random() < 0.1
    victims = list(site.processes) if everything else [chance.choice(sorted(site.processes))]
    site.wait(chance.uniform(0.0, 2.0))
    for process in victims:
        site.kill(process)
    name = "all at once" if everything else "random"
    return Case(name, ",".join(victims) if not everything else "all", seed, True, site.revive(victims, within))


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
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many minutes")
    parser.add_argument("--out", type=Path, default=None, help="the network's directory and the results")
    arguments = parser.parse_args()
    out = arguments.out or Path(tempfile.mkdtemp(prefix="grailnode-crashes-"))
    results = out / "cases.jsonl"
    cases = [Case(**json.loads(line)) for line in results.read_text().splitlines()] if results.exists() else []
    done = {(case.point if case.point != "all at once" else "random", case.seed) for case in cases}
    wanted = [(point, seed) for seed in range(arguments.seeds) for point in POINTS if (point.name, seed) not in done]
    wild = [seed for seed in range(arguments.kills) if ("random", seed) not in done]
    found: list[str] = []
    with Site.open(out) as site, results.open("a") as file:
        end = site.now() + 60.0 * arguments.minutes
        turns: list[tuple[Point | None, int]] = [*wanted, *((None, seed) for seed in wild)]
        for number, (point, seed) in enumerate(turns, 1):
            if site.now() > end:
                break
            case = run_point(site, point, seed, arguments.within) if point else run_random(site, seed, arguments.within)
            file.write(json.dumps(asdict(case)) + "\n")
            file.flush()
            cases.append(case)
            if number % 20 == 0:
                found += audit(site)
                print(f"{len(cases)} kills, {len(found)} violations", flush=True)
        site.settle()
        found += audit(site)
    slow = [case for case in cases if case.seconds > arguments.within]
    print(table(cases))
    for line in sorted(set(found)):
        print(f"violated: {line}")
    for case in slow:
        print(f"not back within {arguments.within:g} s: {case.process} after {case.point}, seed {case.seed}")
    kills = sum(case.reached for case in cases)
    print(f"{kills} kills, {len(set(found))} violations, {len(slow)} slow recoveries; the network lies in {out}")
    sys.exit(1 if found or slow else 0)


if __name__ == "__main__":
    main()
