"""The evidence of many runs of a miner's groups at once: what groups add to it, and when it refuses the miner.

protocol/judging/evidence.py computes what each rollout adds. In a run the evidence is tested after whole groups, and
here after each rollout, so that it shows which cheats are refused within their first group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from bench.proofs.setting import columns_of_positions
from grailnode.calibration.pairs import GroupMeasurement
from protocol.judging.evidence import Counts, weigh
from protocol.proof import MEASURED, StatisticName, Thresholds

_ORDERS: Final = 50


@dataclass(frozen=True)
class Additions:
    """What groups add to the evidence of the measured statistics, by a row with J alternatives of these.

    Attributes:
        added: int64 [G, R, J], by each rollout.
        tokens: int64 [G, R], of each rollout.
    """

    row: Thresholds
    added: np.ndarray
    tokens: np.ndarray

    @classmethod
    def of(cls, groups: Sequence[GroupMeasurement], row: Thresholds) -> "Additions":
        """Return what some groups of equally many rollouts add."""
        added = np.array([[_added(rollout.counts(row), row) for rollout in _rollouts(group)] for group in groups])
        return cls(row, added, np.array([group.lengths for group in groups]))

    def tokens_until_refused(self, statistics: Sequence[StatisticName] = MEASURED) -> float | None:
        """Return the tokens until a miner is refused, as the median over random orders of its groups; None if it is not
        refused in half of the orders or more.

        Args:
            statistics: those that are tested.
        """
        chosen = [name in statistics for name in self.row.alternatives if name in MEASURED]
        generator, needed = np.random.default_rng(0), []
        for _ in range(_ORDERS):
            order = generator.permutation(len(self.added))
            evidence = cusum(self.added[order].reshape(-1, len(chosen))[:, chosen])
            refused = (evidence > self.row.threshold).any(axis=1)
            tokens = int(self.tokens[order].reshape(-1)[: refused.argmax() + 1].sum())
            needed.append(tokens if refused.any() else np.inf)
        median = float(np.median(needed))
        return median if np.isfinite(median) else None


def cusum(added: np.ndarray) -> np.ndarray:
    """Return the evidence after each of some groups, w(n) = max(0, w(n - 1)) + e(n): int64 [N, J] from [N, J]. It is
    the sum of all that was added, less the smallest sum before.
    """
    sums = np.concatenate([np.zeros_like(added[:1]), np.cumsum(added, axis=0)])
    evidence: np.ndarray = sums[1:] - np.minimum.accumulate(sums)[:-1]
    return evidence


def added_by_groups(groups: Sequence[GroupMeasurement], row: Thresholds) -> np.ndarray:
    """Return what each group adds to the evidence of each alternative: int64 [G, J]."""
    return np.array([_added(group.counts(row), row) for group in groups])


def _added(counts: Counts, row: Thresholds) -> list[int]:
    return [value for name, value in zip(row.alternatives, weigh(counts, row), strict=True) if name in MEASURED]


def _rollouts(group: GroupMeasurement) -> Iterator[GroupMeasurement]:
    """Yield each rollout as a group."""
    begin = 0
    for length in group.lengths:
        part = {name: getattr(group, name)[begin : begin + length] for name in columns_of_positions()}
        yield replace(group, lengths=(length,), rewards=(), turns=(), **part)
        begin += length
