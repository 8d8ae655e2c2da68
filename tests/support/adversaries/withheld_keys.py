"""A miner with many keys that sees its finished rollouts, and shows the windows of the keys that it likes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from protocol.judging.ledger import LedgerRow, Summary, balances, shares
from protocol.proof import ProofSpec
from protocol.run import ScoringSpec

_MINER = bytes(32)
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Withholding:
    """What a key is worth of which a share of the windows is withheld, when its balance does not change any more.

    Attributes:
        balance: in groups.
        used: whether its groups are trained on, because it earns something.
        income: its balance beyond the deposit, as a share of that of a key that shows everything.
    """

    balance: float
    used: bool
    income: float


def worth(withheld: float, groups: int, scoring: ScoringSpec, proof: ProofSpec) -> Withholding:
    """Return what a key is worth of which a share of the windows is withheld, spread evenly.

    Args:
        groups: that it pledges for each window.
    """
    balance, honest = (_balance(share, groups, scoring, proof) for share in (withheld, 0.0))
    used = shares({_MINER: balance}, scoring)[_MINER] > 0.0
    income = max(0.0, balance - scoring.deposit) / (honest - scoring.deposit) if honest > scoring.deposit else 0.0
    return Withholding(balance, used, income)


def largest_share(groups: int, scoring: ScoringSpec, proof: ProofSpec) -> float:
    """Return the largest share of its windows that a key may withhold and still be trained on, to 0.1%; 0 for none."""
    steps = 1000
    usable = [step for step in range(steps) if worth(step / steps, groups, scoring, proof).used]
    return max(usable, default=0) / steps


def bias(withheld: float, groups: int) -> float:
    """Return by how many standard deviations of a group the mean of the groups that are shown is shifted.

    The miner shows the windows with the highest mean of anything that it can compute of a group, for instance of its
    mean reward, and groups are independent: the mean of the upper part of a normal distribution.
    """
    if withheld == 0.0:
        return 0.0
    return _NORMAL.pdf(_NORMAL.inv_cdf(withheld)) / (1.0 - withheld) / math.sqrt(groups)


def free_bias(keys: int) -> float:
    """Return the shift if keys that earn nothing were used: of `keys` groups, only the best one is shown."""
    step = 0.001
    points = (step * number for number in range(-8000, 8001))
    return step * sum(x * keys * _NORMAL.pdf(x) * _NORMAL.cdf(x) ** (keys - 1) for x in points)


def _balance(withheld: float, groups: int, scoring: ScoringSpec, proof: ProofSpec) -> float:
    ledger: Sequence[Summary] = [
        _summary(window, _row(groups, is_shown=math.floor((window + 1) * withheld) == math.floor(window * withheld)))
        for window in range(scoring.windows)
    ]
    return balances(ledger, scoring, proof)[_MINER]


def _row(groups: int, *, is_shown: bool) -> LedgerRow:
    if not is_shown:
        return LedgerRow.undelivered(_MINER, groups)
    return LedgerRow.model_construct(
        miner=_MINER,
        verdict=bytes(32),
        arithmetic="torch-float32",
        pledged=groups,
        submitted=groups,
        dealt=groups,
        audited=groups,
        accepted=groups,
        rejected=0,
        tokens=0,
        positions=0,
        sketch_misses=0,
        margin_misses=0,
        sketch_points=0,
        margin_points=0,
        far_rollouts=0,
    )


def _summary(window: int, row: LedgerRow) -> Summary:
    return Summary.model_construct(
        window=window, arithmetic="torch-float32", roster=(bytes(32),), judges=1, rows=(row,), amendments=()
    )
