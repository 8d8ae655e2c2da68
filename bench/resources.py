"""Memory, descriptors and threads of processes over time, and whether they grow.

    python -m bench.resources DIR/samples.jsonl --warm-up 900

prints the table of samples that bench/soak.py kept, with another warm-up.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.processes.programs import members

_MIB: Final = 1 << 20
_BETWEEN_SECONDS: Final = 60.0
"""Two samples of one process say something about its slope when they are so far apart, or half of its life."""


@dataclass(frozen=True)
class Sample:
    """A process at a time.

    Attributes:
        name: of the node and the process in it; seconds: since the bench began; age: since the process was first seen.
        resident, private: bytes of RAM in all, and without pages of files.
    """

    name: str
    pid: int
    seconds: float
    age: float
    resident: int
    private: int
    descriptors: int
    threads: int


class ProcessMonitor:
    """Takes samples of all processes of some sessions."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._first_seconds: dict[int, float] = {}

    def take_samples(self, seconds: float, node: str, session: int) -> None:
        """Take a sample of every process of a node's session."""
        for pid in members(session):
            first_seconds = self._first_seconds.setdefault(pid, seconds)
            try:
                status = dict(
                    line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
                )
                descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
                resident, private = (int(status[name].split()[0]) << 10 for name in ("VmRSS", "RssAnon"))
            except (OSError, KeyError):
                continue  # it has just ended
            process = "supervisor" if pid == session else status["Name"].strip()
            name = process if process.startswith(node) else f"{node}/{process}"
            threads = int(status["Threads"])
            self.samples.append(
                Sample(name, pid, seconds, seconds - first_seconds, resident, private, descriptors, threads)
            )


def slope(series: Iterable[Sequence[tuple[float, float]]]) -> float:
    """Return the median of the slopes between distant points of one series (Theil and Sen), or NaN without any."""
    slopes = []
    for points in series:
        if not points:
            continue
        far = min(_BETWEEN_SECONDS, (points[-1][0] - points[0][0]) / 2)
        for index, (x, y) in enumerate(points):
            slopes += [(later - y) / (at - x) for at, later in points[index + 1 :] if at - x >= max(far, 1e-9)]
    return statistics.median(slopes) if slopes else float("nan")


def table(samples: Sequence[Sample], warm_up: float) -> str:
    """Return a table with a row for each process of each node, of its samples at an age above `warm_up` seconds.

    Slopes are within one process; 'first' is the first sample of the first process that is old enough, 'last' the last
    sample of the last one.
    """
    series_by_process: dict[str, dict[int, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        series_by_process[sample.name][sample.pid]  # counts a life that was too short as well
        if sample.age >= warm_up:
            series_by_process[sample.name][sample.pid].append(sample)
    lines = [
        f"{'process':24} {'lives':>5} {'longest':>7} {'RSS first':>9} {'last':>6} {'slope':>7} {'private':>7}"
        f" {'fds':>4} {'last':>4} {'most':>4} {'slope':>6} {'threads':>7} {'most':>4}"
    ]
    for name, by_pid in sorted(series_by_process.items()):
        old = [life for life in by_pid.values() if life]
        if not old:
            continue
        first, last = old[0][0], old[-1][-1]
        resident, private, descriptors = (
            3600 * slope([(point.seconds, getattr(point, field)) for point in life] for life in old)
            for field in ("resident", "private", "descriptors")
        )
        everything = [point for life in old for point in life]
        lines.append(
            f"{name:24} {len(by_pid):5} {max(life[-1].age for life in old) / 60:7.1f} {first.resident / _MIB:9.1f}"
            f" {last.resident / _MIB:6.1f} {resident / _MIB:+7.2f} {private / _MIB:+7.2f} {first.descriptors:4}"
            f" {last.descriptors:4} {max(point.descriptors for point in everything):4} {descriptors:+6.1f}"
            f" {first.threads:7} {max(point.threads for point in everything):4}"
        )
    lines.append(
        "longest life in minutes; RSS in MiB; slopes in an hour: RSS and its private pages in MiB, descriptors"
    )
    return "\n".join(lines)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", type=Path)
    parser.add_argument(
        "--warm-up", type=float, default=180.0, help="seconds of a process's life that count for nothing"
    )
    arguments = parser.parse_args()
    samples = [Sample(**json.loads(line)) for line in arguments.samples.read_text().splitlines()]
    print(table(samples, arguments.warm_up))


if __name__ == "__main__":
    main()
