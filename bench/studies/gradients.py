"""Why gradients are dense and versions are not: what a step moves, and how much of it the BF16 view shows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from bench.studies.effects import BINS
from bench.studies.figures import Labels, Line, linear_axis, log_axis, write_figure
from bench.studies.records import DISTANCES, WORKLOADS, Record, Records
from bench.studies.workloads import Recipe
from bench.tables import percent, print_table, rate_text

RATES: Final = (1e-6, 3e-6, 1e-5)


def study_gradients(records: Records, figures: Path) -> None:
    """Print and draw what steps do."""
    runs = {
        f"{workload}, {rate_text(rate)}": records.of(workload, Recipe(rate)) for workload in WORKLOADS for rate in RATES
    }
    _print_sizes({workload: records.of(workload, Recipe()) for workload in WORKLOADS})
    columns: tuple[str, ...] = ("non-zero", "changed", "expected", "gradient in changed", "update in changed")
    rows = [[name, *(_share(run, column) for column in columns)] for name, run in runs.items()]
    header = ["workload and rate", "gradients that are not 0", "BF16 values changed", "expected",
              "of the gradient's square in these", "of the update's square in these"]  # fmt: skip
    print_table("what a step does", header, rows)
    columns = ("mean", "median", "99%", "largest")
    rows = [[name, *(f"{run.effects.figures[column]:.3f}" for column in columns)] for name, run in runs.items()]
    print_table("size of an update divided by the learning rate", ["workload and rate", *columns], rows)
    rows = [
        [name, kind, *(f"{values[str(k)]:.2f}" for k in DISTANCES)]
        for name, run in runs.items()
        for kind, values in (("cosine", run.effects.cosines), ("length", run.effects.lengths))
    ]
    header = ["workload and rate", "", *(f"k = {k}" for k in DISTANCES)]
    print_table("change of the view beside the change of the masters", header, rows)
    _draw_sizes(figures / "update-sizes.svg", runs)
    _draw_cosines(figures / "effective-change.svg", runs)


def _draw_sizes(path: Path, runs: Mapping[str, Record]) -> None:
    lines = [
        Line(name, list(zip(map(float, BINS), run.effects.classes, strict=True)))
        for name, run in runs.items()
        if not name.endswith(rate_text(RATES[1]))
    ]
    labels = Labels(
        "Sizes of updates in units in the last place of BF16",
        "A value changes in a step with a probability of about this size.",
        "log2 of |update| / unit in the last place", "share of the weights",
    )  # fmt: skip
    most = max(share for item in lines for _, share in item.points)
    y = linear_axis(0, most * 1.1, 0.05, percent=True)
    write_figure(path, labels, lines, linear_axis(BINS[0], BINS[-1], 2), y)


def _draw_cosines(path: Path, runs: Mapping[str, Record]) -> None:
    lines = [Line(name, [(k, run.effects.cosines[str(k)]) for k in DISTANCES]) for name, run in runs.items()]
    labels = Labels(
        "Cosine between the change of the BF16 view over k steps and that of the masters",
        "At 1 the view moves in the direction of the masters.", "k, steps", "cosine",
    )  # fmt: skip
    x = log_axis(1, DISTANCES[-1], marks={k: str(k) for k in DISTANCES})
    write_figure(path, labels, lines, x, linear_axis(0, 1, 0.2))


def _print_sizes(runs: Mapping[str, Record]) -> None:
    """Print sizes of weights, as in PULSE, Table 2."""
    columns = ("50%", "mean", "5%", "95%")
    rows = [
        [name, *(f"{run.sizes[column]:.4f}" for column in columns), percent(run.sizes["above"])]
        for name, run in runs.items()
    ]
    print_table("sizes of the weights", ["workload", "median", "mean", "5%", "95%", "above 7.7e-4"], rows)


def _share(run: Record, column: str) -> str:
    return percent(run.effects.figures[column]) if column in run.effects.figures else "-"
