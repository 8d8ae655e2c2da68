"""How often honest sites are refused, and how much of what they send counts: no attack, and many seeds."""

from collections.abc import Iterator
from itertools import product
from statistics import fmean
from typing import Final

from bench.outer.methods import VARIANTS
from bench.tables import print_table
from tests.support.simulation.noisy_sites import weighed_rounds

KINDS: Final = ("diloco", "averaging", "exact", "grid", "sparse-32", "sparse-128")
NOISE: Final = 10.0
"""Length of a step's noise, divided by that of the gradient: sites agree with a cosine of 0.2 where H = 1."""


def honest(seeds: int, rounds: int, sites: int = 4) -> None:
    """Print the table."""
    header = ("H", "sites", "kind", "seeds with refusals", "most of a site", "factor", "least of a site")
    rows = _rows(seeds, rounds, sites)
    print_table(f"{sites} honest sites, {rounds} rounds, {seeds} seeds", header, rows)


def _rows(seeds: int, rounds: int, sites: int) -> Iterator[list[str]]:
    for local_steps, unequal, kind in product((1, 2, 8), (False, True), KINDS):
        first = local_steps if not unequal else 1 if local_steps > 1 else 2
        steps, rules = [first, *[local_steps] * (sites - 1)], VARIANTS[kind].rules(local_steps, rounds)
        runs = [weighed_rounds(rules, rounds, steps=steps, seed=seed, noise=NOISE)[0] for seed in range(seeds)]
        factors = [[weighting.factors for weighting in run] for run in runs]
        refused = [max(sum(factor == 0 for factor in site) for site in zip(*run, strict=True)) for run in factors]
        counted = [[fmean(site) for site in zip(*run, strict=True)] for run in factors]
        cells = [str(local_steps), "unequal" if unequal else "equal", kind]
        cells += [f"{sum(count > 0 for count in refused)} of {seeds}", f"{max(refused)} of {rounds}"]
        yield [*cells, f"{fmean(map(fmean, counted)):.2f}", f"{min(map(min, counted)):.2f}"]
