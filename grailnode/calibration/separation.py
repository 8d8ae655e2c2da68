"""What the thresholds do to copies: the share of a copy's rollouts, groups and windows that the judge's own tests
refuse.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from grailnode.calibration.measure import WIDEST_SKETCH, CalibrationError, Honest, beyond, refused
from grailnode.calibration.pairs import GroupMeasurement
from protocol.judging.evidence import compute_evidence, surprisal_threshold, window_surprisal
from protocol.run import ProofSpec

DUE_BITS: Final = 4
"""A copy of so many bits a weight has to be refused."""
DUE_POWER: Final = 0.99
_WINDOWS: Final = 1000


class TooWideError(CalibrationError):
    """The honest distribution hides a copy that has to be told apart."""


@dataclass(frozen=True)
class DetectionPower:
    """What was refused of a copy that one pair made and checked.

    Attributes:
        bits: of its weights.
        tokens: looked at.
        rollouts, groups, windows: share of each that was refused: rollouts by themselves, without the median, which is
            a group's; windows are drawn from the groups.
    """

    bits: int
    pair: str
    tokens: int
    rollouts: float
    groups: float
    windows: float


def power(bits: int, pair: str, observed: Sequence[GroupMeasurement], spec: ProofSpec, window: int) -> DetectionPower:
    """What the thresholds refuse of a copy.

    Args:
        observed: what the check saw of its groups.
        window: audited groups of a window.
    """
    weighed = [group.weigh(spec) for group in observed]
    caught = np.array([refused(evidence, spec) for evidence in weighed])
    drawn = np.random.default_rng(0).integers(0, len(weighed), (_WINDOWS, window))
    windows = 0
    for members in drawn:
        counts = [weighed[i].counts for i in members]
        windows += bool(caught[members].any()) or window_surprisal(counts, spec) > surprisal_threshold(spec)
    by_itself = spec.model_copy(update={"sketch_median": WIDEST_SKETCH})
    alone = [refused(compute_evidence(*part, spec), by_itself) for group in observed for part in _rollouts(group)]
    return DetectionPower(
        bits=bits,
        pair=pair,
        tokens=sum(evidence.tokens for evidence in weighed),
        rollouts=float(np.mean(alone)),
        groups=float(caught.mean()),
        windows=windows / _WINDOWS,
    )


def _rollouts(group: GroupMeasurement) -> list[tuple[np.ndarray, np.ndarray, list[int]]]:
    ends = np.cumsum(group.lengths)
    return [
        (group.distances[end - length : end], group.margins[end - length : end], [length])
        for end, length in zip(ends, group.lengths, strict=True)
    ]


def check(powers: Sequence[DetectionPower], honest: Honest, spec: ProofSpec, window: int) -> None:
    """Insist that a copy of DUE_BITS is told apart.

    Raises:
        TooWideError: it is not, by one of the pairs; says which statistic of which honest pair is in the way.
    """
    weak = min((item for item in powers if item.bits == DUE_BITS), key=lambda item: item.windows)
    if weak.windows >= DUE_POWER:
        return
    sketch, positions = _widest(honest, "fresh", spec.sketch_tolerance)
    margin, draws = _widest(honest, "margins", spec.margin)
    raise TooWideError(
        f"the honest distribution is too wide: of a {DUE_BITS}-bit copy's windows of {window} groups (pair {weak.pair}), "
        f"{weak.windows:.1%} are refused where {DUE_POWER:.0%} are due; the widest pairs are {sketch} in sketches "
        f"({positions:.2%} of positions beyond {spec.sketch_tolerance}, {spec.sketch_rate:.2%} allowed) and {margin} in "
        f"margins ({draws:.2%} of tokens beyond {spec.margin:.2g}, {spec.margin_rate:.2%} allowed): leave pairs out "
        "(--pairs), or measure more --rollouts"
    )


def _widest(honest: Honest, name: str, threshold: float) -> tuple[str, float]:
    """The pair with the largest share of values beyond a threshold (the largest mean where they are equal), and that
    share.
    """
    values = {pair: np.concatenate([getattr(group, name) for group in groups]) for pair, groups in honest.items()}
    pair = max(values, key=lambda pair: (float(beyond(values[pair], threshold).mean()), float(values[pair].mean())))
    return pair, float(beyond(values[pair], threshold).mean())
