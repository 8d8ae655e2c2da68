"""Series over windows or versions, in which None stands for a missing measurement, and judged groups added up."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Self

from grailnode.observe.state import MinerRow
from grailnode.ui.formatting import clean


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
    def text(self) -> str:
        """'0.43 → 0.79  +0.36'."""
        return f"{self.ends_text}  {self.gain:+.2f}"

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Self | None:
        """Return the change over a series; None if nothing was measured."""
        measurements = without_gaps(values)
        return cls(measurements[0], measurements[-1]) if measurements else None


@dataclass(frozen=True)
class Tally:
    """Groups of one or more miners: accepted ones, and rejected ones by reason code."""

    accepted: int
    reasons: Mapping[str, int]

    @property
    def rejected(self) -> int:
        return sum(self.reasons.values())

    @property
    def judged(self) -> int:
        return self.accepted + self.rejected

    @classmethod
    def of(cls, rows: Iterable[MinerRow]) -> Self:
        accepted = 0
        reasons: Counter[str] = Counter()
        for row in rows:
            accepted += row.accepted
            reasons.update(row.rejected)
        return cls(accepted, dict(reasons))


def by_count(reasons: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return reasons with their counts, the most frequent first; ties by name, so that output repeats."""
    return sorted(((reason, n) for reason, n in reasons.items() if n > 0), key=lambda item: (-item[1], item[0]))


def reasons_text(reasons: Mapping[str, int], most: int = 8) -> str:
    """Write 'reason n' for each reason, the most frequent first; '+2' stands for two more than `most`."""
    ranked = by_count(reasons)
    parts = [f"{clean(reason)} {count}" for reason, count in ranked[:most]]
    return ", ".join([*parts, f"+{len(ranked) - most}"] if len(ranked) > most else parts)
