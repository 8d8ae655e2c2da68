"""One poisoned site in four: the end values with the bounds of protocol/outer/robust.py and with the plain mean."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Final

from rich.console import Console
from rich.table import Table

from bench.outer.attacks import ATTACKS
from bench.outer.learning import best_rate, differences, interval
from bench.outer.results import Results
from bench.outer.trials import POISONED, ROUNDS, Outcome, Trial

BAR: Final = 0.03


def poisoned(results: Results, seeds: int, methods: Sequence[str], rounds: int = ROUNDS) -> None:
    """Print the table."""
    table = Table(
        title=f"site {POISONED} of four is poisoned; H = 8, {rounds} rounds; mean and 95% interval over seeds"
    )
    for title in (
        "method",
        "attack",
        "seeds",
        "plain mean",
        "bounded",
        "minus clean",
        "area",
        "refused",
        "honest",
        "holds",
    ):
        table.add_column(title, justify="right")
    clean = {method: Trial(method, best_rate(results, method), rounds=rounds) for method in methods}
    cells: dict[tuple[str, str, bool], list[Outcome]] = {}
    for seed in range(seeds):
        for method in methods:
            for attack in ("", *ATTACKS):
                for robust in (False, True):
                    trial = replace(clean[method], seed=seed, attack=attack, robust=robust)
                    cells.setdefault((method, attack, robust), []).extend(results.of([trial]))
    for method in methods:
        for attack in ("", *ATTACKS):
            plain, bounded = cells[method, attack, False], cells[method, attack, True]
            if plain and bounded:
                row = _row(plain, bounded, cells[method, "", False], rounds)
                table.add_row(method, attack or "none", str(len(bounded)), *row)
    Console(width=150).print(table)


def _row(plain: Sequence[Outcome], bounded: Sequence[Outcome], clean: Sequence[Outcome], rounds: int) -> list[str]:
    gaps = differences(bounded, clean)
    refused = fmean(outcome.refused[POISONED] for outcome in bounded)
    honest = fmean(sum(outcome.refused) - outcome.refused[POISONED] for outcome in bounded)
    return [
        interval([outcome.end for outcome in plain]),
        interval([outcome.end for outcome in bounded]),
        interval(gaps),
        interval([outcome.area for outcome in bounded]),
        f"{refused:.0f} of {rounds}",
        f"{honest:.1f} of {3 * rounds}",
        "yes" if fmean(gaps) >= -BAR else "no",
    ]
