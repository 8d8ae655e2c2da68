"""Changes, means and last values of series over windows or versions; None stands for a missing measurement."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Self


def without_gaps(values: Sequence[float | None]) -> list[float]:
    """Return the values that were measured, in order."""
    return [value for value in values if value is not None]


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that were measured; None if there are none."""
    measurements = without_gaps(values)
    return fmean(measurements) if measurements else None


def last(values: Sequence[float | None]) -> float | None:
    """Return the newest value that was measured; None if there are none."""
    return next((value for value in reversed(values) if value is not None), None)


@dataclass(frozen=True)
class Change:
    """The first and the last measurement of a series."""

    first: float
    last: float

    @property
    def gain(self) -> float:
        """Last minus first, both rounded to two decimals as they are printed: 0.44 to 0.78 is 0.34 to every reader."""
        return round(round(self.last, 2) - round(self.first, 2), 2)

    @property
    def ends_text(self) -> str:
        """'0.43 → 0.79'."""
        return f"{self.first:.2f} → {self.last:.2f}"

    @property
    def gain_text(self) -> str:
        """'+0.36'."""
        return f"{self.gain:+.2f}"

    @property
    def text(self) -> str:
        """'0.43 → 0.79  +0.36'."""
        return f"{self.ends_text}  {self.gain_text}"

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Self | None:
        """Return the change over a series; None if nothing was measured."""
        measurements = without_gaps(values)
        return cls(measurements[0], measurements[-1]) if measurements else None
