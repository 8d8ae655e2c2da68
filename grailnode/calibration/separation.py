"""Tests thresholds on copies: the share of a copy's groups and windows that the judge's own test refuses."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from grailnode import UserError
from grailnode.calibration.pairs import GroupMeasurement
from grailnode.calibration.proof_file import CopyRow
from protocol.judging.evidence import NO_EVIDENCE, is_improbable
from protocol.proof import Thresholds

REQUIRED_BITS: Final = 4
"""A copy with weights of so many bits has to be refused."""
REQUIRED_POWER: Final = 0.99
"""Share of its windows that has to be refused."""
_WINDOWS: Final = 1000


def power(bits: int, pair: str, groups: Sequence[GroupMeasurement], spec: Thresholds, window: int) -> CopyRow:
    """Return the shares of a copy's groups that the thresholds refuse; windows are random selections of groups."""
    counts = [group.counts(spec) for group in groups]
    selections = np.random.default_rng(0).integers(0, len(counts), (_WINDOWS, window)).tolist()
    return CopyRow(
        bits=bits,
        pair=pair,
        tokens=sum(item.margin.trials for item in counts),
        groups=float(np.mean([is_improbable(NO_EVIDENCE, [item], spec) for item in counts])),
        windows=float(np.mean([is_improbable(NO_EVIDENCE, [counts[i] for i in part], spec) for part in selections])),
    )


def check(powers: Sequence[CopyRow], window: int) -> None:
    """Check that a copy of REQUIRED_BITS is refused; raise UserError if one of the pairs does not refuse it."""
    weak = min((item for item in powers if item.bits == REQUIRED_BITS), key=lambda item: item.windows)
    if weak.windows < REQUIRED_POWER:
        raise UserError(
            f"the honest distribution is too wide: of a {REQUIRED_BITS}-bit copy's windows of {window} groups (pair "
            f"{weak.pair}), {weak.windows:.1%} are refused where {REQUIRED_POWER:.0%} are required; leave out the "
            "pairs with the largest distances and margins (--pairs), or measure more --rollouts"
        )
