"""One poisoned site in four: end values with the plain mean, with the bounds of a round, and with those over rounds."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Final

from bench.outer.attacks import ATTACKS, PART_TIME
from bench.outer.learning import best_rate, differences
from bench.outer.results import Results
from bench.outer.trials import POISONED, ROUNDS, Outcome, Trial
from bench.tables import interval, print_table

BAR: Final = 0.03
AGGREGATIONS: Final = {
    "plain mean": (False, True),
    "bounds of a round": (True, False),
    "bounds over rounds": (True, True),
}
"""By name: `robust` and `over_rounds` of a trial. The second is run for drifts alone, since only those take rounds."""


def poisoned(
    results: Results, seeds: int, methods: Sequence[str], attacks: Sequence[str] = tuple(ATTACKS), rounds: int = ROUNDS
) -> None:
    """Print the table."""
    clean = {method: Trial(method, best_rate(results, method), rounds=rounds) for method in methods}
    cells: dict[tuple[str, str, str], list[Outcome]] = {}
    for seed in range(seeds):
        for method in methods:
            for attack in ("", *attacks):
                for name, (robust, over_rounds) in AGGREGATIONS.items():
                    if name != "bounds of a round" or "drift" in attack:
                        trial = replace(clean[method], seed=seed, attack=attack, robust=robust, over_rounds=over_rounds)
                        cells.setdefault((method, attack, name), []).extend(results.of([trial]))
    columns = ("method", "attack", "aggregation", "seeds", "end", "minus clean", "area", "refused", "honest ones")
    rows = []
    for (method, attack, name), own in cells.items():
        if own:
            row = _row(own, cells[method, "", "plain mean"], rounds, rounds // 2 if attack in PART_TIME else rounds)
            rows.append([method, attack or "none", name, str(len(own)), *row])
    title = f"one poisoned site in four; H = 8, {rounds} rounds; mean and 95% interval over seeds"
    print_table(title, (*columns, "drift", "holds"), rows)


def _row(own: Sequence[Outcome], clean: Sequence[Outcome], rounds: int, attended: int) -> list[str]:
    gaps = differences(own, clean)
    refused = fmean(outcome.refused[POISONED] for outcome in own)
    honest = fmean(sum(outcome.refused) - outcome.refused[POISONED] for outcome in own)
    return [
        interval([outcome.end for outcome in own]),
        interval(gaps),
        interval([outcome.area for outcome in own]),
        f"{refused:.0f} of {attended}",
        f"{honest:.1f} of {3 * rounds}",
        f"{fmean(outcome.drift for outcome in own):+.3f}",
        "yes" if fmean(gaps) >= -BAR else "no",
    ]
