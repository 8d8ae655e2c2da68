"""The soak tells memory that grows from memory that does not."""

import math
import os
import random

import pytest

from bench.resources import ProcessMonitor, Sample, slope, table

MIB = 1 << 20


def life(pid: int, start: float, minutes: int, mib_per_hour: float, name: str = "node/role") -> list[Sample]:
    """Return samples of a process that grows from 100 MiB, with noise, and with one outlier in a hundred."""
    chance = random.Random(pid)
    samples = []
    for second in range(0, 60 * minutes, 10):
        noise = chance.gauss(0, 0.5) + (50 if chance.random() < 0.01 else 0)
        size = round((100 + mib_per_hour * second / 3600 + noise) * MIB)
        samples.append(Sample(name, pid, start + second, second, size, size, 10, 3))
    return samples


@pytest.mark.parametrize("growth", [0.0, 30.0, -12.0])
def test_the_slope_is_found_through_noise_and_outliers(growth: float) -> None:
    slopes = slope([[(s.seconds, s.resident / MIB) for s in life(1, 0, 60, growth)]])
    assert 3600 * slopes == pytest.approx(growth, abs=1.0)


def test_a_restart_is_no_shrinking_and_a_short_life_says_nothing() -> None:
    series_by_process = [life(pid, 1000 * pid, 15, 30.0) for pid in range(1, 4)]
    series = [[(s.seconds, s.resident / MIB) for s in one] for one in series_by_process]
    assert 3600 * slope(series) == pytest.approx(30.0, abs=2.0)
    assert math.isnan(slope([[(0.0, 1.0)], []]))


def test_the_table_leaves_the_warm_up_out() -> None:
    samples = life(1, 0, 30, 0.0) + life(2, 1800, 2, 500.0, "node/young")
    rows = table(samples, warm_up=180.0).splitlines()
    assert [row.split()[0] for row in rows[1:-1]] == ["node/role"]
    assert rows[1].split()[1] == "1"


def test_a_real_process_is_sampled() -> None:
    monitor = ProcessMonitor()
    monitor.take_samples(0.0, "tests", os.getsid(0))
    (own,) = [sample for sample in monitor.samples if sample.pid == os.getpid()]
    assert own.resident > own.private > 0
    assert own.threads >= 1
    assert own.descriptors >= 3
