"""Judged groups, added up: how many were accepted, and how many were rejected for which reason."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from rich.cells import cell_len

from grailnode.observe.state import MinerRow
from grailnode.ui.formatting import clean


@dataclass(frozen=True)
class Tally:
    """Groups of one or more miners: accepted ones, and rejected ones by reason code."""

    accepted: int
    reasons: Mapping[str, int]

    @property
    def rejected(self) -> int:
        """Groups rejected, for any reason."""
        return sum(self.reasons.values())

    @property
    def judged(self) -> int:
        """Groups that were judged."""
        return self.accepted + self.rejected

    @classmethod
    def of(cls, rows: Iterable[MinerRow]) -> Self:
        """Add up the groups of some miners."""
        accepted = 0
        reasons: Counter[str] = Counter()
        for row in rows:
            accepted += row.accepted
            reasons.update(row.rejected)
        return cls(accepted, dict(reasons))


def by_count(reasons: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return reasons with their counts, the most frequent first; ties by name, so that output repeats."""
    return sorted(((reason, n) for reason, n in reasons.items() if n > 0), key=lambda item: (-item[1], item[0]))


def reasons_text(reasons: Mapping[str, int], cells: int, gap: str = ", ") -> str:
    """Write as many 'reason n' as fit into `cells`, the most frequent first; '+2' stands for two more reasons."""
    ranked = by_count(reasons)
    text = ""
    for index, (reason, count) in enumerate(ranked):
        longer = f"{text}{gap if text else ''}{clean(reason)} {count}"
        more = len(ranked) - index - 1
        tail = f"{gap}+{more}" if more else ""
        if cell_len(longer) + cell_len(tail) > cells:
            rest = f"{gap}+{len(ranked) - index}" if text else clean(longer, max(cells, 1))
            return text + rest
        text = longer
    return text
