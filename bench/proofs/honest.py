"""Table (a): how often honest work is refused, over pairs of honest engines.

Thresholds are measured on groups of one seed, and the table on groups of another. All groups of a pair are those of one
miner, which is judged group by group. A line has how many of them are refused, and the largest evidence of each
statistic, in decades.

The last columns have false alarms: groups that are refused of 1,000 histories of 1,000 groups, drawn with replacement
from the measured ones, whose evidence begins anew after a refusal. They are judged by the row of the profile and by one
with a headroom of 1, with thresholds for higher levels: of N groups, no more than N times the level should be refused.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from bench.proofs.power import describe
from bench.proofs.profiles import PROFILES, group_counts, select
from bench.proofs.runs_of_evidence import added_by_groups
from bench.proofs.setting import Setting
from grailnode.calibration.pairs import GroupMeasurement
from protocol.judging.evidence import NO_EVIDENCE, advance, exceeded
from protocol.proof import DECADE, MEASURED, StatisticName, Thresholds

_LEVELS: Final = (1e-2, 1e-4)
_HISTORIES: Final = 1000
_GROUPS: Final = 1000  # of a history


def refusals(groups: Sequence[GroupMeasurement], row: Thresholds) -> tuple[int, dict[StatisticName, int]]:
    """Return how many groups of a miner are refused, and the largest evidence of each statistic."""
    evidence, refused, largest = NO_EVIDENCE, 0, dict.fromkeys(MEASURED, 0)
    for group in groups:
        evidence = advance(evidence, group.counts(row), row)
        refused += exceeded(evidence, row) is not None
        for name, value in zip(row.alternatives, evidence, strict=True):
            if name in MEASURED:
                largest[name] = max(largest[name], value)
    return refused, largest


def false_alarms(added: np.ndarray, level: float) -> int:
    """Return how many groups of random histories are refused at a level.

    Args:
        added: int64 [G, J], what each measured group adds to the evidence.
    """
    threshold = math.ceil(DECADE * math.log10(added.shape[1] / level))
    generator, alarms = np.random.default_rng(0), 0
    evidence = np.zeros((_HISTORIES, added.shape[1]), np.int64)
    for _ in range(_GROUPS):
        evidence = evidence.clip(min=0) + added[generator.integers(0, len(added), _HISTORIES)]
        refused = (evidence > threshold).any(axis=1)
        evidence[refused] = 0
        alarms += int(refused.sum())
    return alarms


async def table(setting: Setting, groups: int, only: str) -> None:
    """Print the table for each profile whose name contains `only`.

    Args:
        groups: groups of each pair.
    """
    for profile in select(only):
        rows = await profile.thresholds(setting), await profile.thresholds(setting, 1.0)
        print(f"{profile.name}: {describe(rows[0])}")
        alarms = "".join(
            f"  {f'{level:g}, {name}':>17}" for name in ("headroom 4.2", "headroom 1") for level in _LEVELS
        )
        print(
            f"{'pair':24}{'rollouts':>9}{'tokens':>9}{'refused':>9}"
            + "".join(f"{name:>8}" for name in MEASURED)
            + alarms
        )
        pairs = profile.pairs(setting)
        _print_rows(await setting.measure(profile.name, pairs, group_counts(pairs, groups), setting.test_seed), rows)
        for other in PROFILES:
            if other.dtype == profile.dtype and other != profile:
                same = {"same": other.pairs(setting)["same"]}
                measured = await setting.measure(other.name, same, {"same": groups}, setting.test_seed)
                _print_rows({f"same of {other.name}": measured["same"]}, rows)
        bounds = "".join(f"  {_HISTORIES * _GROUPS * level:17g}" for _ in rows for level in _LEVELS)
        print(f"{'at most':83}{bounds}\n", flush=True)


def _print_rows(measurements: Mapping[str, Sequence[GroupMeasurement]], rows: Sequence[Thresholds]) -> None:
    for name, measured in measurements.items():
        refused, largest = refusals(measured, rows[0])
        rollouts, tokens = (sum(map(count, (group.lengths for group in measured))) for count in (len, sum))
        evidence = "".join(f"{value / DECADE:8.2f}" for value in largest.values())
        alarms = [
            false_alarms(added, level)
            for row in rows
            for added in [added_by_groups(measured, row)]
            for level in _LEVELS
        ]
        print(
            f"{name:24}{rollouts:9}{tokens:9}{refused:9}{evidence}" + "".join(f"  {count:17}" for count in alarms),
            flush=True,
        )
