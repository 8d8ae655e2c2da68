"""How the methods learn: end values, areas under the curves and bytes, with a learning rate for each method."""

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Final

from bench.outer.methods import VARIANTS
from bench.outer.results import Results
from bench.outer.trials import ROUNDS, Outcome, Trial
from bench.tables import interval, print_table

METHODS: Final = ("ddp", "diloco", "exact", "grid", "sparse-32", "sparse-128")
SWEEP_SEEDS: Final[tuple[int, ...]] = (1000, 1001)
LONG_ROUNDS: Final = 16
"""The H for which methods with an outer momentum have a sweep of their own: a round moves the weights further there."""
_MOMENTUM_RATES: Final = (1e-5, 3e-5, 1e-4)
_PLAIN_RATES: Final = (1e-4, 3e-4, 1e-3)


def rates_of(variant: str) -> tuple[float, ...]:
    """Return the learning rates that are tried."""
    return _MOMENTUM_RATES if VARIANTS[variant].method.momentum else _PLAIN_RATES


def sweep(results: Results, variant: str, local_steps: int) -> list[tuple[float, list[Outcome]]]:
    """Return the learning rates that are tried, and what they gave.

    The sweep with H = 8 serves every H, but for methods with an outer momentum and `LONG_ROUNDS`; there, the lower two
    rates are tried with the first seed.
    """
    sweeps, rates, seeds = [], rates_of(variant), SWEEP_SEEDS
    if local_steps == LONG_ROUNDS and VARIANTS[variant].method.momentum:
        rates, seeds = rates[:2], SWEEP_SEEDS[:1]
    else:
        local_steps = 8
    for rate in rates:
        outcomes = results.of([Trial(variant, rate, local_steps, seed) for seed in seeds])
        sweeps += [(rate, outcomes)] if outcomes else []
    return sweeps


def best_rate(results: Results, variant: str, local_steps: int = 8) -> float:
    """Return the rate with the best end value."""
    sweeps = sweep(results, variant, local_steps)
    return max(sweeps, key=lambda pair: mean_end(pair[1]))[0] if sweeps else rates_of(variant)[1]


def mean_end(outcomes: Sequence[Outcome]) -> float:
    """Return the mean of the end values."""
    return fmean(outcome.end for outcome in outcomes)


def differences(own: Sequence[Outcome], others: Sequence[Outcome]) -> list[float]:
    """Return the differences of end values, seed by seed."""
    return [one.end - other.end for one, other in zip(own, others, strict=False)]


def learning(
    results: Results,
    seeds: int,
    local_steps: Sequence[int] = (8, 4, 16),
    methods: Sequence[str] = METHODS,
    rounds: int = ROUNDS,
) -> None:
    """Print the sweep and the table of the methods."""
    rates = {(steps, method): best_rate(results, method, steps) for steps in local_steps for method in methods}
    cells: dict[tuple[int, str], list[Outcome]] = {}
    for seed in range(seeds):
        for steps in local_steps:
            for method in methods:
                trial = Trial(method, rates[steps, method], steps, seed, rounds)
                cells.setdefault((steps, method), []).extend(results.of([trial]))
    _print_sweep(results, local_steps, methods)
    rows = []
    for steps in sorted(local_steps):
        base = cells.get((steps, "diloco"), [])
        for method in methods:
            own = cells[steps, method]
            if own:
                rows.append([str(steps), method, f"{rates[steps, method]:g}", str(len(own)), *_row(method, own, base)])
    columns = (
        "H", "method", "rate", "seeds", "end", "minus DiLoCo", "area", "sent", "bytes a round", "of DiLoCo", "holds",
    )  # fmt: skip
    print_table(f"{rounds} rounds, four sites; mean and 95% interval over seeds", columns, rows)


def _print_sweep(results: Results, local_steps: Sequence[int], methods: Sequence[str]) -> None:
    rows = []
    for steps in (8, LONG_ROUNDS):
        for method in methods:
            if steps == LONG_ROUNDS and (steps not in local_steps or not VARIANTS[method].method.momentum):
                continue
            cells = [
                f"{rate:g}: {mean_end(outcomes):.3f}, {fmean(outcome.area for outcome in outcomes):.3f}"
                for rate, outcomes in sweep(results, method, steps)
            ]
            rows.append([str(steps), method, *cells])
    print_table("learning rates: end value, area under the curve", ("H", "method", "first", "second", "third"), rows)


def _row(method: str, own: Sequence[Outcome], base: Sequence[Outcome]) -> list[str]:
    size = fmean(fmean(outcome.payload_bytes) for outcome in own)
    sent = f"{fmean(fmean(outcome.sent) for outcome in own):.1%}"
    cells = [interval([outcome.end for outcome in own])]
    gaps = differences(own, base)
    if method == "diloco" or not gaps:
        return [*cells, "", interval([outcome.area for outcome in own]), sent, f"{size:.0f}", "1x", ""]
    ratio = fmean(fmean(outcome.payload_bytes) for outcome in base) / size
    holds = ""
    if method in ("exact", "grid") and len(base) > 1:
        spread = stdev([outcome.end for outcome in base])
        holds = f"{'yes' if fmean(gaps) >= -spread else 'no'} (sd {spread:.3f})"
    elif method.startswith("sparse"):
        holds = f"{'yes' if fmean(gaps) >= -0.03 else 'no'} (0.03)"
    area = interval([outcome.area for outcome in own])
    return [*cells, interval(gaps), area, sent, f"{size:.0f}", f"{ratio:.3g}x", holds]
