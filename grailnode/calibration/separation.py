"""Tests thresholds on copies: the share of a copy's rollouts, groups and windows that the judge's own tests refuse."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from grailnode.calibration.pairs import GroupMeasurement
from grailnode.calibration.proof_file import CopyRow
from grailnode.calibration.thresholds import WIDEST_SKETCH, CalibrationError, Honest, beyond, is_refused
from protocol.judging.evidence import compute_evidence, surprisal_threshold, window_surprisal
from protocol.proof import Thresholds

REQUIRED_BITS: Final = 4
"""A copy with weights of so many bits has to be refused."""
REQUIRED_POWER: Final = 0.99
"""Share of its windows that has to be refused."""
_WINDOWS: Final = 1000


class TooWideError(CalibrationError):
    """The honest distribution hides a copy that has to be refused."""


def power(bits: int, pair: str, groups: Sequence[GroupMeasurement], spec: Thresholds, window: int) -> CopyRow:
    """Return the shares of a copy that the thresholds refuse.

    A rollout is tested without the limit on the median, which is for groups; windows are random selections of groups.

    Args:
        groups: measurements of the copy's groups.
        window: audited groups of a window.
    """
    weighed = [group.weigh(spec) for group in groups]
    refusals = np.array([is_refused(evidence, spec) for evidence in weighed])
    selections = np.random.default_rng(0).integers(0, len(weighed), (_WINDOWS, window))
    windows = 0
    for members in selections:
        counts = [weighed[i].counts for i in members]
        windows += bool(refusals[members].any()) or window_surprisal(counts, spec) > surprisal_threshold(spec)
    without_median = spec.model_copy(update={"sketch_median": WIDEST_SKETCH})
    rollouts = [
        is_refused(compute_evidence(*part, spec), without_median) for group in groups for part in _rollouts(group)
    ]
    return CopyRow(
        bits=bits,
        pair=pair,
        tokens=sum(evidence.tokens for evidence in weighed),
        rollouts=float(np.mean(rollouts)),
        groups=float(refusals.mean()),
        windows=windows / _WINDOWS,
    )


def _rollouts(group: GroupMeasurement) -> list[tuple[np.ndarray, np.ndarray, list[int]]]:
    ends = np.cumsum(group.lengths)
    return [
        (group.distances[end - length : end], group.margins[end - length : end], [length])
        for end, length in zip(ends, group.lengths, strict=True)
    ]


def check(powers: Sequence[CopyRow], honest: Honest, spec: Thresholds, window: int) -> None:
    """Check that a copy of REQUIRED_BITS is refused.

    Raises:
        TooWideError: one of the pairs does not refuse it; the message names the honest pairs with the widest
        statistics.
    """
    weak = min((item for item in powers if item.bits == REQUIRED_BITS), key=lambda item: item.windows)
    if weak.windows >= REQUIRED_POWER:
        return
    sketch, positions = _widest(honest, "fresh", spec.sketch_tolerance)
    margin, tokens = _widest(honest, "margins", spec.margin)
    raise TooWideError(
        f"the honest distribution is too wide: of a {REQUIRED_BITS}-bit copy's windows of {window} groups (pair "
        f"{weak.pair}), {weak.windows:.1%} are refused where {REQUIRED_POWER:.0%} are required; the widest pairs are "
        f"{sketch} in sketches ({positions:.2%} of positions beyond {spec.sketch_tolerance}, {spec.sketch_rate:.2%} "
        f"allowed) and {margin} in margins ({tokens:.2%} of tokens beyond {spec.margin:.2g}, {spec.margin_rate:.2%} "
        "allowed): leave pairs out (--pairs), or measure more --rollouts"
    )


def _widest(honest: Honest, name: str, threshold: float) -> tuple[str, float]:
    """Return the pair with the largest share of values beyond a threshold (among equals the largest mean), and that
    share.
    """
    values = {pair: np.concatenate([getattr(group, name) for group in groups]) for pair, groups in honest.items()}
    pair = max(values, key=lambda pair: (float(beyond(values[pair], threshold).mean()), float(values[pair].mean())))
    return pair, float(beyond(values[pair], threshold).mean())
