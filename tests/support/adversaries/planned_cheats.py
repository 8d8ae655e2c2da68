"""What a miner gains by plans that no single window shows, by the ledger and the tests of a history.

A planned cheat cheats in a share of its windows. A miner that withholds has many keys, sees its finished rollouts, and
shows the windows of the keys that it likes.
"""

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

from protocol.judging.evidence import CountedWindow, Counts, history_surprisal, surprisal_threshold, window_surprisal
from protocol.judging.ledger import LedgerRow, Summary, balances, histories, shares
from protocol.proof import ProofSpec, Thresholds
from protocol.run import ScoringSpec
from tests.support.builders.proofs import proof_of

_MINER = bytes(32)
_NORMAL = NormalDist()


@dataclass(frozen=True)
class PlannedCheat:
    """A way to cheat.

    Attributes:
        saved: share of a group's work that a false group saves.
        misses: share of the tokens of a false group that miss the margin; 1.0 for a group that is plainly false.
        sacrifice: every so many windows it delivers one plainly false group alone; 0 for never.
        groups: groups of a window.
        tokens: tokens of a group.
    """

    name: str
    saved: float
    misses: float
    sacrifice: int = 0
    groups: int = 16
    tokens: int = 200


PLANS = (
    PlannedCheat("one invented group of 16", saved=1.0 / 16, misses=1.0),
    PlannedCheat("16 invented groups", saved=1.0, misses=1.0),
    PlannedCheat("wrong in 5% of the tokens, 16 groups", saved=0.6, misses=0.05),
    PlannedCheat("wrong in 5% of the tokens, 1 group of 24 tokens", saved=0.6, misses=0.05, groups=1, tokens=24),
    PlannedCheat("the same, with a sacrifice in 20 windows", 0.6, 0.05, sacrifice=20, groups=1, tokens=24),
    PlannedCheat("wrong in 2% of the tokens, 1 group of 472 tokens", saved=0.6, misses=0.02, groups=1, tokens=472),
    PlannedCheat("wrong in 0.5% of the tokens, 16 groups of 472", saved=0.5, misses=0.005, tokens=472),
)


def gain(
    plan: PlannedCheat, rate: float, scoring: ScoringSpec, thresholds: Thresholds, audited: float, seed: int
) -> float:
    """Return what cheating gains, in shares of an honest miner's balance: the work it saves minus the credit it loses.

    Args:
        rate: share of the windows in which the miner cheats.
        audited: share of the groups of a window that are audited.
    """
    rng = random.Random(seed)
    windows = scoring.windows
    cheats: list[Summary] = []
    honest: list[Summary] = []
    saved = worth = 0.0
    for window in range(windows):
        cheating = rng.random() < rate
        sacrificed = bool(plan.sacrifice) and window % plan.sacrifice == plan.sacrifice - 1
        row = _row(plan, cheating, sacrificed, cheats, thresholds, audited, rng)
        cheats.append(_summary(window, row))
        honest.append(_summary(window, _accepted(plan, Counts(plan.groups * plan.tokens, plan.groups * plan.tokens))))
        decay = 0.5 ** ((windows - 1 - window) / scoring.half_life)
        worth += decay
        saved += decay * (plan.saved if cheating else 0.0)
    proof = proof_of(thresholds)
    lost = balances(honest, scoring, proof)[_MINER] - balances(cheats, scoring, proof)[_MINER]
    return (saved - lost / plan.groups) / worth


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
    balance, honest = (_shown_balance(share, groups, scoring, proof) for share in (withheld, 0.0))
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


def _shown_balance(withheld: float, groups: int, scoring: ScoringSpec, proof: ProofSpec) -> float:
    ledger = []
    for window in range(scoring.windows):
        is_shown = math.floor((window + 1) * withheld) == math.floor(window * withheld)
        row = _make_row(groups, 0, Counts(0, 0)) if is_shown else LedgerRow.undelivered(_MINER, groups)
        ledger.append(_summary(window, row))
    return balances(ledger, scoring, proof)[_MINER]


def _row(
    plan: PlannedCheat,
    cheating: bool,
    sacrificed: bool,
    ledger: list[Summary],
    thresholds: Thresholds,
    audited: float,
    rng: random.Random,
) -> LedgerRow:
    """Return the result of a window. A rejection causes the judgement of all groups."""
    whole = plan.groups * plan.tokens
    count = max(1, math.ceil(audited * plan.groups))
    if sacrificed or (cheating and plan.misses == 1.0):
        false = round(plan.saved * plan.groups) if not sacrificed else 1
        if min(rng.sample(range(plan.groups), count)) < false:
            return _rejected(plan, false)
        return _accepted(plan, Counts(whole, whole))
    misses = sum(rng.random() < plan.misses for _ in range(whole)) if cheating else 0
    counts = Counts(whole, whole, margin_misses=misses)
    history = [*histories(ledger, proof_of(thresholds)).get(_MINER, []), CountedWindow(counts, thresholds)]
    worst = max(window_surprisal([counts], thresholds), history_surprisal(history))
    return _rejected(plan, plan.groups) if worst > surprisal_threshold(thresholds) else _accepted(plan, counts)


def _accepted(plan: PlannedCheat, counts: Counts) -> LedgerRow:
    return _make_row(plan.groups, 0, counts)


def _rejected(plan: PlannedCheat, rejected: int) -> LedgerRow:
    rest = plan.groups - rejected
    return _make_row(plan.groups, rejected, Counts(rest * plan.tokens, rest * plan.tokens))


def _make_row(groups: int, rejected: int, counts: Counts) -> LedgerRow:
    return LedgerRow.model_construct(
        miner=_MINER,
        verdict=bytes(32),
        arithmetic="torch-float32",
        pledged=groups,
        submitted=groups,
        dealt=groups,
        audited=groups,
        accepted=groups - rejected,
        rejected=rejected,
        tokens=counts.tokens,
        positions=counts.positions,
        sketch_misses=counts.sketch_misses,
        margin_misses=counts.margin_misses,
        sketch_points=counts.sketch_points,
        margin_points=counts.margin_points,
        far_rollouts=counts.far_rollouts,
    )


def _summary(window: int, row: LedgerRow) -> Summary:
    return Summary.model_construct(
        window=window, arithmetic="torch-float32", roster=(bytes(32),), judges=1, rows=(row,), amendments=()
    )
