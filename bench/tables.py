"""Tables in Markdown, as bench/results has them, and the numbers in them."""

from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Final

_STUDENT: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95% quantiles of Student's t with 1 to 9 degrees of freedom."""


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table under its title, each row as soon as it is computed."""
    print(f"\n{title}\n")
    print(f"| {' | '.join(header)} |")
    print("|" + "---|" * len(header))
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def rate_text(rate: float) -> str:
    """Return a learning rate of one digit, like 3e-6."""
    return f"{rate:.0e}".replace("e-0", "e-")


def percent(share: float) -> str:
    """Return a share with three digits that count."""
    return f"{100 * share:#.3g}%".replace(".%", "%")


def interval(values: Sequence[float]) -> str:
    """Return the mean and half of its 95% interval by Student's t; for one value that value, for none nothing."""
    if len(values) < 2:
        return "".join(f"{value:.3f}" for value in values)
    half = _STUDENT[min(len(values), 10) - 2] * stdev(values) / sqrt(len(values))
    return f"{fmean(values):.3f} ± {half:.3f}"
