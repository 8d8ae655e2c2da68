"""Variations of the methods: without error feedback or momentum, other quantizers and densities, and a delay."""

from collections.abc import Sequence
from statistics import fmean
from typing import Final

from bench.outer.learning import best_rate, differences
from bench.outer.methods import VARIANTS
from bench.outer.results import Results
from bench.outer.trials import ROUNDS, Outcome, Trial
from bench.tables import interval, print_table

COMPARED: Final = {
    "diloco": ("averaging", "diloco, delay 1"),
    "grid": ("grid, no feedback", "grid, f = 0", "grid, f = 1", "grid, delay 1"),
    "sparse-128": (
        "sparse-32", "sparse-128, no feedback", "sparse-128, momentum", "sparse-128, 1 bit", "sparse-128, 3 bits",
        "sparse-128, FP32 values", "sparse-128, 3 streams",
    ),
}  # fmt: skip
"""A method, and what is varied. A variation has the method's learning rate, unless it changes the outer momentum or the
density, which need one of their own."""


def ablations(results: Results, seeds: int, local_steps: int, names: Sequence[str] = (), rounds: int = ROUNDS) -> None:
    """Print the table.

    Args:
        names: the methods and variations to run; none for all.
    """
    rates = {}
    for method, variations in COMPARED.items():
        for name in (method, *variations):
            if names and name not in names:
                continue
            own = VARIANTS[name].method, VARIANTS[method].method
            same = own[0].momentum == own[1].momentum and own[0].coding.chosen == own[1].coding.chosen
            rates[name] = best_rate(results, method if same else name)
    cells: dict[str, list[Outcome]] = {}
    for seed in range(seeds):
        for name, rate in rates.items():
            cells.setdefault(name, []).extend(results.of([Trial(name, rate, local_steps, seed, rounds)]))
    rows = []
    for method, variations in COMPARED.items():
        for name in (method, *variations):
            own_outcomes = cells.get(name, [])
            if not own_outcomes:
                continue
            gaps = differences(own_outcomes, cells.get(method, []))
            rows.append([
                name, f"{rates[name]:g}", str(len(own_outcomes)), interval([outcome.end for outcome in own_outcomes]),
                interval(gaps) if name != method and gaps else "", interval([outcome.area for outcome in own_outcomes]),
                f"{fmean(fmean(outcome.sent) for outcome in own_outcomes):.1%}",
                f"{fmean(fmean(outcome.payload_bytes) for outcome in own_outcomes):.0f}",
            ])  # fmt: skip
    columns = ("variation", "rate", "seeds", "end", "minus the method", "area", "sent", "bytes a round")
    print_table(f"H = {local_steps}, {rounds} rounds, four sites; mean and 95% interval over seeds", columns, rows)
