"""One poisoned site in four: how far it moves the weights, with the plain mean and with the bounds of robust.py."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from bench.outer.honest import NOISE
from bench.outer.methods import VARIANTS
from bench.tables import print_table
from tests.support.simulation.noisy_sites import SIZE, Attack, Vector, weighed_rounds

_NORMAL: Final = np.random.default_rng(4).standard_normal(SIZE)
_DIRECTION: Final = (_NORMAL / np.linalg.norm(_NORMAL)).astype(np.float32)


def _turned(update: Vector, sine: float) -> Vector:
    """Return an update of the same length that is turned towards the direction, by an angle with this sine."""
    along = float(update @ _DIRECTION)
    rest = update - along * _DIRECTION
    length = np.linalg.norm(update)
    turned: Vector = (length * ((1 - sine**2) ** 0.5 * rest / np.linalg.norm(rest) + sine * _DIRECTION)).astype(
        np.float32
    )
    return turned


def _replay() -> Attack:
    kept: list[Vector] = []

    def attack(update: Vector, number: int) -> Vector:
        kept.append(update)
        return kept[min(number, 3)]

    return attack


ATTACKS: Final[dict[str, Callable[[], Attack | None]]] = {
    "none": lambda: None,
    "drift of 0.01 more each round": lambda: lambda update, number: _turned(update, min(0.95, 0.01 * (number + 1))),
    "half drift": lambda: lambda update, _: _turned(update, 0.5),
    "drift of 0.1": lambda: lambda update, _: _turned(update, 0.1),
    "sign flip": lambda: lambda update, _: -update,
    "times 1000": lambda: lambda update, _: 1000 * update,
    "replay": _replay,
}
"""What site 1 sends instead of its update, base - local, by name. A replay is of its fourth update."""


def poisoned(method: str, local_steps: int, rounds: int, names: Sequence[str] = ()) -> None:
    """Print the table. Progress and drift are shares of the way that the mean goes with four honest sites.

    Args:
        names: of the attacks; none for all.
    """
    rules, steps = VARIANTS[method].rules(local_steps, rounds), [local_steps] * 4
    begin = weighed_rounds(rules, 0, steps=steps)[1]
    clean = (weighed_rounds(rules, rounds, steps=steps, noise=NOISE, has_bounds=False)[1] - begin).astype(np.float64)
    rows = []
    for name, new_attack in ATTACKS.items():
        if names and name not in names:
            continue
        for has_bounds in (False, True):
            run = weighed_rounds(rules, rounds, steps=steps, noise=NOISE, attack=new_attack(), has_bounds=has_bounds)
            way = (run[1] - begin).astype(np.float64)
            progress = way @ clean / (clean @ clean)
            # without what the way of the honest sites has of that direction by chance
            drift = -(way - progress * clean) @ _DIRECTION / np.linalg.norm(clean)
            factors = np.array([weighting.factors for weighting in run[0]])
            refused, counted = (factors[:, 1] == 0).sum(), factors.mean(axis=0)
            rows.append([
                name, "bounds" if has_bounds else "plain mean", f"{progress:.3f}", f"{drift:+.3f}",
                f"{refused} of {rounds}", f"{counted[1]:.2f}", f"{np.delete(counted, 1).min():.2f}",
            ])  # fmt: skip
            print("|".join(rows[-1]), flush=True)
    columns = ("attack", "aggregation", "progress", "drift", "rounds refused", "factor", "least honest one")
    print_table(f"one poisoned site in four, {method}, H = {local_steps}, {rounds} rounds", columns, rows)
