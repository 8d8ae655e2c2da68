"""Table (a): how often honest work is refused, over pairs of honest engines.

Thresholds are measured on groups of one seed, and the table on groups of another. There are three kinds of refusals:
of a group by itself, of a window of 16 groups, and of a miner's history. For the last one, all groups of the pair are
windows of one miner, and its history is tested after each of them.
"""

import numpy as np

from bench.proofs.setting import TEST_SEED, Profile, Setting
from grailnode.calibration.pairs import GroupMeasurement
from grailnode.calibration.thresholds import beyond, is_refused
from grailnode.calibration.variants import Pair
from protocol.judging.evidence import history_surprisal, surprisal_threshold, window_surprisal
from protocol.proof import Thresholds
from tests.support.builders.proofs import windows_of

WINDOW_GROUPS = 16
MAX_GROUPS_ALONE = 112
MAX_GROUPS_BFLOAT16 = 224


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
        f"{spec.margin:.2g}, margin rate {spec.margin_rate:.2g}, margin limit {spec.margin_limit:.2g}, level "
        f"{spec.level:g}, from {spec.positions} positions"
    )


async def table(setting: Setting, groups: int, calibration: int, only: str) -> None:
    """Print the table for both profiles, or for those whose names contain `only`.

    Args:
        setting: the policy and the folder of results.
        groups: groups of each pair in the table.
        calibration: groups of each pair for the thresholds.
        only: part of a profile's name; empty for both.
    """
    for profile in [profile for profile in setting.profiles() if only in profile.name]:
        spec = await setting.proof(profile, calibration)
        print(f"{profile.name}: {describe(spec)}")
        await _rows(setting, profile, spec, groups)


def _group_count(pair: Pair, groups: int) -> int:
    """Return how many groups of a pair are measured: fewer if it computes sequences one at a time or in bfloat16, which
    take long.
    """
    return min(
        groups, MAX_GROUPS_ALONE if "alone" in pair.name else MAX_GROUPS_BFLOAT16 if "bfloat16" in pair.name else groups
    )


async def _rows(setting: Setting, profile: Profile, spec: Thresholds, groups: int) -> None:
    totals = [0, 0, 0, 0, 0]
    print(
        "pair                      rollouts    tokens  refused: groups windows histories  "
        "off sketch  off margin  worst margin"
    )
    for pair in profile.pairs:
        groups_of_pair = await setting.measure(pair, _group_count(pair, groups), TEST_SEED)
        distances = np.concatenate([group.fresh for group in groups_of_pair])
        margins = np.concatenate([group.margins for group in groups_of_pair])
        rollouts = sum(len(group.lengths) for group in groups_of_pair)
        row = (rollouts, len(margins), *refusals(groups_of_pair, spec))
        print(
            f"{pair.name:24} {row[0]:9} {row[1]:9}  {row[2]:15} {row[3]:7} {row[4]:9}  "
            f"{beyond(distances, spec.sketch_tolerance).mean():10.2e}  {beyond(margins, spec.margin).mean():10.2e}  "
            f"{margins.max():12.2e}",
            flush=True,
        )
        totals = [total + count for total, count in zip(totals, row, strict=True)]
    print(f"{'all':24} {totals[0]:9} {totals[1]:9}  {totals[2]:15} {totals[3]:7} {totals[4]:9}\n", flush=True)
