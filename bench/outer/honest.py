"""How often honest sites are refused, and how much of what they send counts: no attack, and many seeds."""

from collections.abc import Iterator, Sequence
from itertools import product
from statistics import fmean
from typing import Final

from bench.outer.methods import VARIANTS
from bench.outer.results import Results
from bench.outer.trials import Trial
from bench.tables import print_table
from tests.support.simulation.noisy_sites import weighed_rounds

KINDS: Final = ("diloco", "averaging", "exact", "grid", "sparse-32", "sparse-128")
NOISE: Final = 10.0
"""Length of a step's noise, divided by that of the gradient: sites agree with a cosine of 0.2 where H = 1."""

RATES: Final = {"demo": 7e-6, "smollm2": 5e-6}
"""Policies that are trained with reinforcement learning, and the learning rates of their demos."""


def honest(
    results: Results,
    policy: str,
    seeds: int,
    rounds: int,
    local_steps: Sequence[int] = (1, 2, 8),
    kinds: Sequence[str] = KINDS,
) -> None:
    """Print the table for a policy, or for noisy gradients alone."""
    cells = [*product(local_steps, (False, True), kinds)]
    trials = [
        Trial(kind, RATES.get(policy, 3e-5), steps, seed, rounds, policy, unequal, weighed=True)
        for seed in range(seeds)
        for steps, unequal, kind in cells
    ]
    header = ("H", "sites", "kind", "seeds with refusals", "most of a site", "factor", "least of a site")
    title = f"four honest sites, {rounds} rounds, {policy}"
    if policy in RATES:
        results.of(trials)  # seed by seed
    print_table(title, header, _rows(results, trials, len(cells)))


def _rows(results: Results, trials: Sequence[Trial], cells: int) -> Iterator[list[str]]:
    for own in (trials[place::cells] for place in range(cells)):
        if own[0].policy in RATES:
            runs = [outcome.factors for outcome in results.of(own)]
        else:
            runs = [_noisy_factors(trial) for trial in own]
        if not runs:
            continue
        trial, rounds = own[0], own[0].rounds
        refused = [max(sum(factor == 0 for factor in site) for site in zip(*run, strict=True)) for run in runs]
        counted = [[fmean(site) for site in zip(*run, strict=True)] for run in runs]
        row = [str(trial.local_steps), "unequal" if trial.unequal else "equal", trial.variant]
        row += [f"{sum(count > 0 for count in refused)} of {len(runs)}", f"{max(refused)} of {rounds}"]
        yield [*row, f"{fmean(map(fmean, counted)):.2f}", f"{min(map(min, counted)):.2f}"]


def _noisy_factors(trial: Trial) -> list[tuple[float, ...]]:
    rules = VARIANTS[trial.variant].rules(trial.local_steps, trial.rounds)
    run = weighed_rounds(rules, trial.rounds, steps=trial.steps, seed=trial.seed, rate=trial.rate, noise=NOISE)
    return [weighting.factors for weighting in run[0]]
