"""How many values change between versions: by distance and learning rate, and by dtype."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Final

from bench.studies.figures import Labels, Line, log_axis, write_figure
from bench.studies.records import DISTANCES, WORKLOADS, Record, Records, Workload
from bench.studies.views import DTYPES
from bench.studies.workloads import Recipe
from bench.tables import percent, print_table, rate_text

RATES: Final = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4)
_LAST: Final = 16  # steps whose mean reward is the reward at the end


def study_rates(records: Records, figures: Path) -> None:
    """Print and draw shares by learning rate and distance, and by learning rate and dtype."""
    for workload in WORKLOADS:
        runs = {rate: records.of(workload, Recipe(rate)) for rate in RATES}
        _print_distances(workload, runs)
        lines = [Line(f"k = {k}", [(rate, run.mean("bfloat16", k)) for rate, run in runs.items()]) for k in DISTANCES]
        title = f"BF16 values of the {workload} that differ between versions k steps apart, by learning rate"
        _draw_by_rate(figures / f"distance-{workload}.svg", title, lines)
        rows = [[rate_text(rate), *(percent(run.mean(dtype, 1)) for dtype in DTYPES)] for rate, run in runs.items()]
        print_table(f"{workload}: values that a step changes, by dtype", ["learning rate", *DTYPES], rows)
        lines = [Line(dtype, [(rate, run.mean(dtype, 1)) for rate, run in runs.items()]) for dtype in DTYPES]
        title = f"Values of the {workload} that a step changes, by dtype and learning rate"
        _draw_by_rate(figures / f"dtypes-{workload}.svg", title, lines)


def _print_distances(workload: Workload, runs: Mapping[float, Record]) -> None:
    header = ["learning rate", *(f"k = {k}" for k in DISTANCES)]
    rows = [[rate_text(rate), *(percent(run.mean("bfloat16", k)) for k in DISTANCES)] for rate, run in runs.items()]
    if workload == "policy":
        header.append("reward at the end")
        for row, run in zip(rows, runs.values(), strict=True):
            row.append(f"{fmean(run.rewards[-_LAST:]):.3f}")
    print_table(f"{workload}: BF16 values that differ between versions k steps apart", header, rows)


def _draw_by_rate(path: Path, title: str, lines: list[Line]) -> None:
    labels = Labels(title, "Both axes are logarithmic.", "learning rate", "share that differs")
    x = log_axis(RATES[0], RATES[-1], marks={rate: rate_text(rate) for rate in RATES})
    write_figure(path, labels, lines, x, log_axis(1e-5, 1))
