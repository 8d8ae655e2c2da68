"""What a miner gains by plans that no single window shows, by the ledger and the evidence of earlier windows.

A planned cheat cheats in a share of its windows. A miner that withholds has many keys, sees its finished rollouts, and
shows the windows of the keys that it likes.
"""

import math
import random
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

from protocol.judging.accounts import Accounts
from protocol.judging.evidence import NO_EVIDENCE, Evidence, is_improbable
from protocol.judging.ledger import GROUP, SHARE, LedgerRow, Summary
from protocol.proof import ProofSpec, Thresholds
from protocol.rollout.sampling import NOISE_UNIT
from protocol.run import ScoringSpec
from tests.support.builders.proofs import advance_window, proof_of
from tests.support.builders.samples import MINER, counts, row

MARGIN = round(0.05 / NOISE_UNIT)
_NORMAL = NormalDist()


@dataclass(frozen=True)
class PlannedCheat:
    """A way to cheat.

    Attributes:
        saved: share of a group's work that a false group saves.
        misses: share of the tokens of a false group that fall short by MARGIN; 1.0 for a group that is plainly false.
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
        thresholds: of float32.
        audited: share of the groups of a window that are audited.
    """
    rng, proof, honest = random.Random(seed), proof_of(thresholds), _row(plan, thresholds)
    evidence, results, saved, value = NO_EVIDENCE, [], 0.0, 0.0
    for window in range(scoring.windows):
        cheating = rng.random() < rate
        sacrificed = bool(plan.sacrifice) and window % plan.sacrifice == plan.sacrifice - 1
        result = _result(plan, cheating, sacrificed, evidence, thresholds, audited, rng)
        evidence = advance_window(evidence, result.counts, thresholds)
        results.append(result)
        decay = (scoring.decay / SHARE) ** (scoring.windows - 1 - window)
        value += decay
        saved += decay * (plan.saved if cheating else 0.0)
    lost = balance_of([honest] * scoring.windows, scoring, proof) - balance_of(results, scoring, proof)
    return (saved - lost / GROUP / plan.groups) / value


@dataclass(frozen=True)
class Withholding:
    """What a key is worth of which a share of the windows is withheld, when its balance does not change any more.

    Attributes:
        balance: in millionths of a group.
        used: whether its groups are trained on, because it earns something.
        income: its balance, as a share of that of a key that shows everything; 0 if it earns nothing.
    """

    balance: int
    used: bool
    income: float


def worth(withheld: float, groups: int, scoring: ScoringSpec, proof: ProofSpec) -> Withholding:
    """Return what a key is worth of which a share of the windows is withheld, spread evenly.

    Args:
        groups: that it pledges for each window.
    """
    balance, honest = (_shown_balance(share, groups, scoring, proof) for share in (withheld, 0.0))
    used = balance > scoring.deposit
    return Withholding(balance, used, balance / honest if used else 0.0)


def largest_share(groups: int, scoring: ScoringSpec, proof: ProofSpec) -> float:
    """Return the largest share of its windows that a key may withhold and still be trained on, to 0.1%; 0 for none.

    A ledger of 100 windows lacks the same number of them at 35.0% and at 35.9%, where the last one is shown. So the
    search goes through 99.9%, 98.9% and so on first, and then through the steps above the first that earns something.
    """

    def largest(steps: range) -> int:
        balances = ((step, _shown_balance(step / 1000, groups, scoring, proof)) for step in reversed(steps))
        return next((step for step, balance in balances if balance > scoring.deposit), 0)

    coarse = largest(range(9, 1000, 10))
    return largest(range(coarse, coarse + 10)) / 1000


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


def _shown_balance(withheld: float, groups: int, scoring: ScoringSpec, proof: ProofSpec) -> int:
    plan = PlannedCheat("withhold", saved=0.0, misses=0.0, groups=groups)
    results = _row(plan, proof.table[0]), LedgerRow(miner=MINER.public, pledged=groups)
    withholds = [
        math.floor((window + 1) * withheld) > math.floor(window * withheld) for window in range(scoring.windows)
    ]
    return balance_of([results[withhold] for withhold in withholds], scoring, proof)


def _result(
    plan: PlannedCheat,
    cheating: bool,
    sacrificed: bool,
    evidence: Evidence,
    thresholds: Thresholds,
    audited: float,
    rng: random.Random,
) -> LedgerRow:
    """Return the result of a window. A rejection causes the judgement of all groups."""
    if sacrificed or (cheating and plan.misses == 1.0):
        false = round(plan.saved * plan.groups) if not sacrificed else 1
        is_seen = min(rng.sample(range(plan.groups), max(1, math.ceil(audited * plan.groups)))) < false
        return _row(plan, thresholds, rejected=false if is_seen else 0)
    misses = sum(rng.random() < plan.misses for _ in range(plan.groups * plan.tokens)) if cheating else 0
    result = _row(plan, thresholds, misses=misses)
    improbable = is_improbable(evidence, [result.counts], thresholds)
    return result.model_copy(update={"accepted": 0, "rejected": plan.groups, "tokens": 0}) if improbable else result


def _row(plan: PlannedCheat, thresholds: Thresholds, rejected: int = 0, misses: int = 0) -> LedgerRow:
    """Return the row of a window whose groups were all audited."""
    groups, accepted = plan.groups, plan.groups - rejected
    step = bisect_left(thresholds.margin.beyond, MARGIN) - 1
    steps = [misses if place == step else 0 for place in range(step + 1)]
    counted = counts(thresholds, sketch=(accepted * plan.tokens,), margin=(accepted * plan.tokens, *steps))
    return row(
        pledged=groups, submitted=groups, audited=groups, accepted=accepted, rejected=rejected, counts=counted
    )  # fmt: skip


def balance_of(results: list[LedgerRow], scoring: ScoringSpec, proof: ProofSpec) -> int:
    return accounts_of([(result,) for result in results], scoring, proof).totals()[0][MINER.public]


def accounts_of(windows: Iterable[tuple[LedgerRow, ...]], scoring: ScoringSpec, proof: ProofSpec) -> Accounts:
    ledger = [
        Summary.model_construct(
            window=window, arithmetic="torch-float32", roster=(bytes(32),), judges=1, rows=rows, amendments=()
        )
        for window, rows in enumerate(windows)
    ]
    return Accounts.of(ledger, scoring, proof)
