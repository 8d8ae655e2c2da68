"""Miners that plan their cheats by the ledger's rules: it costs more than it saves, however rarely they cheat."""

from typing import Any

import pytest

from grailnode.run.creation import SCORING
from protocol.judging.evidence import CountedWindow, Counts, history_surprisal, surprisal_threshold
from protocol.judging.ledger import LedgerRow, Summary, histories
from tests.support.adversaries.harness import alter
from tests.support.adversaries.planned_cheats import PLANS, PlannedCheat, gain
from tests.support.builders.proofs import packaged_thresholds, proof_of
from tests.support.builders.samples import row

PROOF = packaged_thresholds()
MIXED = alter(PROOF, sketch_rate=0.016, margin_rate=0.0015)
SUBTLE = next(plan for plan in PLANS if plan.groups == 1 and plan.tokens == 24 and not plan.sacrifice)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_a_planned_cheat_loses_at_every_rate(plan: PlannedCheat, rate: float) -> None:
    assert gain(plan, rate, SCORING, PROOF, 1.0, seed=0) < 0.0


def test_a_cheat_too_small_to_be_refused_would_pay_without_a_price_for_misses() -> None:
    free = SCORING.model_copy(update={"miss_price": 0.0})
    assert gain(SUBTLE, 0.05, free, MIXED, 1.0, seed=1) > 0.0
    assert gain(SUBTLE, 0.05, SCORING, MIXED, 1.0, seed=1) < 0.0


def test_a_sacrificed_group_does_not_erase_the_evidence() -> None:
    """The miner shows little in each window, and a plainly false group just before its history would refuse it."""

    def summary(result: LedgerRow) -> Summary:
        return Summary.model_construct(
            arithmetic="torch-float32", roster=(bytes(32),), judges=1, rows=(result,), amendments=()
        )

    little: dict[str, Any] = {
        "submitted": 1,
        "audited": 1,
        "pledged": 1,
        "tokens": 24,
        "positions": 24,
        "sketch_misses": 0,
    }
    cheat = summary(row(**little, accepted=1, margin_misses=1))
    none = little | {"tokens": 0, "positions": 0}
    sacrifice = summary(row(**none, accepted=0, rejected=1, margin_misses=0))
    (history,) = histories([*[cheat] * 5, sacrifice], proof_of(PROOF)).values()
    threshold = surprisal_threshold(PROOF)
    window = CountedWindow(Counts(24, 24, 0, 1), PROOF)
    assert history_surprisal([window]) < threshold
    assert history_surprisal([*history, window]) > threshold
