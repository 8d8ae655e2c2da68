"""Miners that plan by the ledger's rules how rarely they cheat, or which of their many keys they show."""

import pytest

from grailnode.run.creation import SCORING as _SCORING
from grailnode.run.rules import Rules
from protocol.judging.accounts import Accounts
from protocol.judging.evidence import NO_EVIDENCE, exceeded, is_improbable
from protocol.judging.ledger import GROUP, SHARE
from roles.trainer.collect.quorum import BELOW_DEPOSIT, LogprobRule, decide
from roles.trainer.verified_batch import USED
from tests.support.adversaries.planned_cheats import PLANS, PlannedCheat, bias, free_bias, gain, largest_share, worth
from tests.support.attacked_nodes.trainer import FIRST, SECOND, AttackedTrainer
from tests.support.builders.chains import MINER
from tests.support.builders.proofs import proof_of
from tests.support.builders.samples import counts, judgement, rejected, row, summary, thresholds, verdict

SCORING = _SCORING.model_copy(update={"deposit": round(Rules().deposit * GROUP)})
THRESHOLDS = thresholds()
SUBTLE = next(plan for plan in PLANS if plan.groups == 1 and plan.tokens == 24 and not plan.sacrifice)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_a_planned_cheat_loses_at_every_rate(plan: PlannedCheat, rate: float) -> None:
    assert gain(plan, rate, SCORING, THRESHOLDS, 1.0, seed=0) < 0.0


def test_a_cheat_too_small_to_be_refused_would_pay_without_a_price_for_misses() -> None:
    free = SCORING.model_copy(update={"miss_price": 0})
    assert gain(SUBTLE, 0.05, free, THRESHOLDS, 1.0, seed=1) > 0.0
    assert gain(SUBTLE, 0.05, SCORING, THRESHOLDS, 1.0, seed=1) < 0.0


def test_a_sacrificed_group_does_not_erase_the_evidence() -> None:
    """The miner shows little in each window, and a plainly false group just before it would be refused."""
    little = counts(THRESHOLDS, margin=(24, 1))
    windows = next(n for n in range(2, 100) if is_improbable(NO_EVIDENCE, [little] * n, THRESHOLDS)) - 1
    cheat = row(MINER, submitted=1, audited=1, accepted=1, pledged=1, counts=little)
    sacrifice = row(MINER, submitted=1, audited=1, accepted=0, rejected=1, pledged=1, counts=counts(THRESHOLDS))
    ledger = [summary(item, window=window) for window, item in enumerate([cheat] * windows + [sacrifice])]
    evidence = Accounts.of(ledger, SCORING, proof_of(THRESHOLDS)).evidence_of(MINER.public, "torch-float32")
    assert exceeded(evidence, THRESHOLDS) is None
    assert is_improbable(evidence, [little], THRESHOLDS)


# Miners with many keys that show only the keys whose rollouts they like: what earns nothing is not trained on


PROOF = proof_of(THRESHOLDS)
RULE = LogprobRule(PROOF)
SCORED = ((MINER.public, SHARE // 2),)


@pytest.mark.parametrize(("scores", "outcome"), [(SCORED, USED), ((), BELOW_DEPOSIT)])
async def test_a_quorum_of_ledgers_must_pay_a_key(scores: tuple[tuple[bytes, int], ...], outcome: str) -> None:
    """One validator cannot buy a place in the training data by a score of its own invention."""
    testbed = AttackedTrainer(quorum=2)
    await testbed.deliver()
    entries = [(FIRST, SCORED), (SECOND, scores)]
    verdicts = {validator: testbed.verdict(validator) for validator, _ in entries}
    records = [(who, testbed.summary(who, verdicts[who], scores=own)) for who, own in entries]
    for validator, record in records:
        await testbed.seal(validator, record)
    for validator, record in records:
        await testbed.reveal(validator, record, verdicts[validator])
    await testbed.collect()
    assert await testbed.outcomes() == {outcome}


def test_a_rejection_is_the_reason_where_there_is_one() -> None:
    accepting, rejecting = verdict(judgement(0)), verdict(rejected(0), validator=bytes(32))
    both = {accepting.validator, rejecting.validator}
    (decision,) = decide([rejecting], 1, set(), RULE, set(), lambda group: both)
    assert decision.reason == "wrong-sketch"
    (decision,) = decide([accepting], 1, {bytes(32)}, RULE, set(), lambda group: both)
    assert (decision.reason, decision.pending) == ("", True)  # the other validator's ledger may pay the miner
    (decision,) = decide([accepting], 1, set(), RULE, {accepting.validator}, lambda group: both)
    assert (decision.reason, decision.pending) == ("", False)


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 8, 16, 64])
def test_a_key_that_withholds_half_of_its_windows_is_not_trained_on_and_less_leaves_a_small_bias(groups: int) -> None:
    assert not worth(0.5, groups, SCORING, PROOF).used
    assert worth(0.0, groups, SCORING, PROOF).used
    share = largest_share(groups, SCORING, PROOF)
    assert share < 0.5
    assert bias(share, groups) < 0.42  # standard deviations of a group, with any number of keys
    assert free_bias(1000) > 3.2  # where every key's groups are used
