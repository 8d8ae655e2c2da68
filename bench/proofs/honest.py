"""Table (a): how often honest work is refused, over pairs of honest engines that thresholds were not measured on.

Thresholds come from groups of one seed, the table from groups of another. A refusal is of a group by itself, of a
window of 16, or of a miner's history: all groups of the pair, each in a window of its own, looked at after every one of
them.
"""

import numpy as np

from bench.proofs.setting import TEST_SEED, Profile, Setting
from grailnode.calibration.pairs import GroupMeasurement
from grailnode.calibration.thresholds import beyond, is_refused
from grailnode.calibration.variants import Pair
from protocol.judging.evidence import history_surprisal, surprisal_threshold, window_surprisal
from protocol.run import ProofSpec

WINDOW = 16
MOST_ALONE = 112
MOST_BFLOAT16 = 224


def refusals(groups: list[GroupMeasurement], spec: ProofSpec) -> tuple[int, int, int]:
    """Groups refused by themselves, windows that are refused together, and windows of one group that a history
    refuses.
    """
    weighed = [group.weigh(spec) for group in groups]
    windows = 0
    for begin in range(0, len(weighed), WINDOW):
        windows += window_surprisal([e.counts for e in weighed[begin : begin + WINDOW]], spec) > surprisal_threshold(
            spec
        )
    counts = [evidence.counts for evidence in weighed]
    late = sum(history_surprisal(counts[: end + 1], spec) > surprisal_threshold(spec) for end in range(len(counts)))
    return sum(is_refused(evidence, spec) for evidence in weighed), windows, late


def describe(spec: ProofSpec) -> str:
    """The thresholds in a line."""
    return (
        f"tolerance {spec.sketch_tolerance}, sketch rate {spec.sketch_rate:.2g}, median {spec.sketch_median}, margin "
        f"{spec.margin:.2g}, margin rate {spec.margin_rate:.2g}, margin limit {spec.margin_limit:.2g}, level "
        f"{spec.level:g}, from {spec.positions} positions"
    )


async def table(setting: Setting, groups: int, calibration: int, only: str) -> None:
    """Print it for both profiles, or for those whose names hold `only`.

    Args:
        groups: of each pair; calibration: of each pair, for the thresholds.
    """
    for profile in [profile for profile in setting.profiles() if only in profile.name]:
        spec = await setting.proof(profile, calibration)
        print(f"{profile.name}: {describe(spec)}")
        await _rows(setting, profile, spec, groups)


def _share(pair: Pair, groups: int) -> int:
    """So many groups, or fewer of what takes long: sequences one at a time, bfloat16 on a processor that has none."""
    return min(groups, MOST_ALONE if "alone" in pair.name else MOST_BFLOAT16 if "bfloat16" in pair.name else groups)


async def _rows(setting: Setting, profile: Profile, spec: ProofSpec, groups: int) -> None:
    totals = [0, 0, 0, 0, 0]
    print(
        "pair                      rollouts    tokens  refused: groups windows histories  "
        "off sketch  off margin  worst margin"
    )
    for pair in profile.pairs:
        seen = await setting.observed(pair, _share(pair, groups), TEST_SEED)
        distances = np.concatenate([group.fresh for group in seen])
        margins = np.concatenate([group.margins for group in seen])
        rollouts = sum(len(group.lengths) for group in seen)
        alone, together, late = refusals(seen, spec)
        print(
            f"{pair.name:24} {rollouts:9} {len(margins):9}  {alone:15} {together:7} {late:9}  "
            f"{beyond(distances, spec.sketch_tolerance).mean():10.2e}  {beyond(margins, spec.margin).mean():10.2e}  "
            f"{margins.max():12.2e}",
            flush=True,
        )
        totals = [a + b for a, b in zip(totals, (rollouts, len(margins), alone, together, late), strict=True)]
    print(f"{'all':24} {totals[0]:9} {totals[1]:9}  {totals[2]:15} {totals[3]:7} {totals[4]:9}\n", flush=True)
