"""Table (a): how often honest work is refused, over pairs of honest engines.

Thresholds are measured on groups of one seed, and the table on groups of another. There are three kinds of refusals:
of a group by itself, of a window of 16 groups, and of a miner's history. For the last one, all groups of the pair are
windows of one miner, and its history is tested after each of them.
"""

from collections.abc import Mapping

import numpy as np

from bench.proofs.profiles import Profile, select
from bench.proofs.setting import TEST_SEED, Setting
from bench.proofs.sides import Pair
from grailnode.calibration.pairs import GroupMeasurement
from grailnode.calibration.thresholds import beyond, is_refused
from protocol.judging.evidence import history_surprisal, surprisal_threshold, window_surprisal
from protocol.proof import Thresholds
from tests.support.builders.proofs import windows_of

WINDOW_GROUPS = 16
MAX_GROUPS_ALONE = 112


def refusals(groups: list[GroupMeasurement], spec: Thresholds) -> tuple[int, int, int]:
    """Return how many groups are refused by themselves, how many windows of 16 groups, and how many windows of one
    group by the history.
    """
    evidences = [group.weigh(spec) for group in groups]
    counts, threshold = [evidence.counts for evidence in evidences], surprisal_threshold(spec)
    window_refusals = 0
    for start in range(0, len(evidences), WINDOW_GROUPS):
        window_refusals += window_surprisal(counts[start : start + WINDOW_GROUPS], spec) > threshold
    history_refusals = sum(
        history_surprisal(windows_of(counts[: end + 1], spec)) > threshold for end in range(len(counts))
    )
    return sum(is_refused(evidence, spec) for evidence in evidences), window_refusals, history_refusals


def describe(spec: Thresholds) -> str:
    """Return a line with the thresholds."""
    return (
        f"tolerance {spec.sketch_tolerance}, sketch rate {spec.sketch_rate:.2g}, median {spec.sketch_median}, margin "
        f"{spec.margin:.2g}, margin rate {spec.margin_rate:.2g}, far margin {spec.far_margin:.2g}, far rate "
        f"{spec.far_rate:.2g}, margin limit {spec.margin_limit:.2g}, level {spec.level:g}, from {spec.positions} "
        "positions"
    )


async def table(setting: Setting, groups: int, only: str) -> None:
    """Print the table for each profile whose name contains `only`.

    Args:
        setting: the policy and the folder of results.
        groups: groups of each profile, which its pairs share.
        only: part of a profile's name; empty for all.
    """
    for profile in select(only):
        row = await profile.thresholds(setting)
        print(f"{profile.name}: {describe(row)}")
        await _rows(setting, profile, row, groups)


def _group_counts(pairs: Mapping[str, Pair], groups: int) -> dict[str, int]:
    """Return how many groups of each pair are measured: fewer if it computes every sequence alone, which takes long."""
    alone = [name for name in pairs if "alone" in name]
    others = -(-(groups - MAX_GROUPS_ALONE * len(alone)) // (len(pairs) - len(alone)))
    return {name: MAX_GROUPS_ALONE if name in alone else others for name in pairs}


async def _rows(setting: Setting, profile: Profile, row: Thresholds, groups: int) -> None:
    totals = [0, 0, 0, 0, 0]
    print(
        "pair                      rollouts    tokens  refused: groups windows histories  "
        "off sketch  off margin  worst margin"
    )
    pairs = profile.pairs(setting)
    measurements = await setting.measure(profile.name, pairs, _group_counts(pairs, groups), TEST_SEED)
    for name, measured in measurements.items():
        distances = np.concatenate([group.fresh for group in measured])
        margins = np.concatenate([group.margins for group in measured])
        counts = (sum(len(group.lengths) for group in measured), len(margins), *refusals(measured, row))
        print(
            f"{name:24} {counts[0]:9} {counts[1]:9}  {counts[2]:15} {counts[3]:7} {counts[4]:9}  "
            f"{beyond(distances, row.sketch_tolerance).mean():10.2e}  {beyond(margins, row.margin).mean():10.2e}  "
            f"{margins.max():12.2e}",
            flush=True,
        )
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
    print(f"{'all':24} {totals[0]:9} {totals[1]:9}  {totals[2]:15} {totals[3]:7} {totals[4]:9}\n", flush=True)
