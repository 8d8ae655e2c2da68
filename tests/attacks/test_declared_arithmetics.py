"""Miners that declare another arithmetic than theirs, or change what they declare, to be judged by wider thresholds."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import trio

from grailnode.calibration.copies import quantized
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from grailnode.engine.torch_engine import TorchEngine
from protocol import environments
from protocol.judging.evidence import CountedWindow, Counts, history_surprisal, surprisal_threshold
from protocol.judging.ledger import balances
from protocol.proof import Arithmetic, Thresholds
from roles.miner.produce import HonestProducer
from roles.trainer.collect.quorum import LOGPROBS_DISAGREE, decide
from roles.trainer.verified_batch import USED
from roles.validator.window_cases import Pledge, read_window_cases
from tests.support.adversaries.harness import PolicyHistory, TrialHarness, TrialOutcome
from tests.support.attacked_nodes.trainer import FIRST, SECOND, WINDOW, AttackedTrainer, make_honest_testbed
from tests.support.attacked_nodes.validator import AttackedValidator
from tests.support.builders import samples
from tests.support.builders.chains import MINER
from tests.support.builders.proofs import packaged_thresholds, proof_of
from tests.support.builders.samples import judgement, row, summary, thresholds, verdict
from tests.support.simulation.network import inline
from tests.support.simulation.virtual_clock import simulated

NARROW = thresholds(margin_rate=1e-4, sketch_rate=1e-4)
WIDE = thresholds(miner="torch-bfloat16", margin_rate=1.2e-3, sketch_rate=1e-3, logprob_tolerance=0.5)
MIXED = proof_of(NARROW, WIDE)
THRESHOLD = surprisal_threshold(NARROW)
TINY = Counts(24, 24, 0, 1)  # a window of one short group with one miss
CLEAN = Counts(400, 400, 0, 0)


def windows(counts: Counts, number: int, declared: Thresholds) -> list[CountedWindow]:
    return [CountedWindow(counts, declared)] * number


def windows_until_refusal(before: list[CountedWindow], declared: Thresholds) -> int:
    """Return after how many windows with misses the history refuses the miner."""
    return next(n for n in range(100) if history_surprisal([*before, *windows(TINY, n, declared)]) > THRESHOLD)


def almost_refused(declared: Thresholds) -> list[CountedWindow]:
    """Return windows with misses, one before the history refuses the miner."""
    return windows(TINY, windows_until_refusal([], declared) - 1, declared)


def test_a_new_declaration_does_not_empty_the_history() -> None:
    evidence = almost_refused(NARROW)
    assert 1 <= windows_until_refusal(evidence, WIDE) <= windows_until_refusal([], WIDE) / 2
    assert windows_until_refusal(evidence, NARROW) == 1


def test_clean_windows_under_wide_thresholds_do_not_lower_the_evidence_under_narrow_ones() -> None:
    evidence = almost_refused(NARROW)
    washed = [*evidence, *windows(CLEAN, 40, WIDE)]
    assert windows_until_refusal(washed, NARROW) <= 2
    same_declaration = WIDE.model_copy(update={"miner": "torch-float32"})  # as if it were all one declaration
    washed = [*evidence, *windows(CLEAN, 40, same_declaration)]
    assert windows_until_refusal(washed, NARROW) == len(evidence) + 1  # nothing is left of the evidence


def test_the_surprisal_of_two_declarations_follows_its_formula() -> None:
    history = [(NARROW, 40, 2), (WIDE, 60, 1), (NARROW, 24, 3)]
    k = np.arange(1, 11)

    def statistic(part: Sequence[tuple[Thresholds, int, int]]) -> float:
        R = np.zeros(10)
        for declared, t, x in part:
            R = (1.0 + R) * 2.0 ** (k * x) / (1.0 + declared.margin_rate * (2.0**k - 1.0)) ** t
        return float(R.mean())

    S = (statistic(history) + statistic([history[0], history[2]]) + statistic(history[1:2])) / 2
    counted = [CountedWindow(Counts(t, t, 0, x), declared) for declared, t, x in history]
    assert history_surprisal(counted) == pytest.approx(np.log10(S))


def test_the_false_rejection_rate_is_bounded_whatever_honest_miners_declare() -> None:
    level, n, miners = 0.005, 20, 150
    rejections = 0
    for seed in range(miners):
        generator = np.random.default_rng(seed)
        declared = [(NARROW, WIDE)[number] for number in generator.integers(0, 2, n)]
        counts = [Counts(400, 400, 0, int(generator.binomial(400, item.margin_rate))) for item in declared]
        history = [CountedWindow(item, rates) for item, rates in zip(counts, declared, strict=True)]
        rejections += any(history_surprisal(history[:end]) > -np.log10(level) for end in range(1, n + 1))
    assert rejections <= miners * n * level


def test_honest_misses_that_one_declaration_allows_do_not_pay_for_another_one() -> None:
    scoring = samples.SCORING.model_copy(update={"miss_price": 1.0, "half_life": 1e6})

    def balance(*ledger_rows: tuple[Arithmetic, int]) -> float:
        """Return the balance of windows of 1,000 tokens, each with its declaration and misses."""
        ledger = [
            summary(
                row(arithmetic=declared, audited=16, accepted=16, tokens=1000, positions=0, sketch_misses=0,
                    margin_misses=misses),
                window=window,
            )
            for window, (declared, misses) in enumerate(ledger_rows)
        ]  # fmt: skip
        (result,) = balances(ledger, scoring, MIXED).values()
        return result

    clean = balance(("torch-float32", 0), ("torch-bfloat16", 0))
    assert clean == pytest.approx(32, abs=0.01)
    assert balance(("torch-bfloat16", 1), ("torch-bfloat16", 1)) == pytest.approx(32, abs=0.01)  # 1.2 are allowed
    assert balance(("torch-float32", 2), ("torch-bfloat16", 0)) == pytest.approx(32 - 1.9, abs=0.01)
    assert balance(("torch-float32", 2), ("torch-float32", 0)) == pytest.approx(32 - 1.8, abs=0.01)


@simulated
async def test_a_commitment_in_another_arithmetic_than_was_pledged_counts_as_undelivered():
    """The miner learns R0, and then wishes for wider thresholds."""
    testbed = AttackedValidator()
    await testbed.announce()
    pledges = await testbed.pledges.read()
    await testbed.commit(arithmetic="torch-bfloat16")
    cases = await read_window_cases(testbed.validator, WINDOW, pledges)
    assert (cases.cases, cases.undelivered) == ((), {MINER.public: Pledge(2, 0, "torch-float32", was_allowed=False)})
    await testbed.commit()
    assert (await read_window_cases(testbed.validator, WINDOW, pledges)).undelivered == {}


@simulated
async def test_a_pledge_of_an_arithmetic_that_the_run_does_not_admit_is_none():
    testbed = AttackedValidator()
    await testbed.announce(arithmetic="torch-bfloat16")
    assert await testbed.pledges.read() == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"validator_arithmetic": "torch-bfloat16"},
        {"miner_arithmetic": "torch-bfloat16"},
        {"miner_arithmetic": "exact", "validator_arithmetic": "exact"},
    ],
)
@simulated
async def test_a_verdict_by_thresholds_that_the_run_does_not_have_is_ignored(changes: dict[str, Arithmetic]) -> None:
    """The validator's own summary names the same arithmetic, so that only the run's table shows it."""
    testbed = await make_honest_testbed(2, FIRST)
    lie = testbed.verdict(SECOND, **changes)
    entry = testbed.summary(SECOND, lie, arithmetic=lie.validator_arithmetic)
    await testbed.seal_and_reveal(SECOND, entry, lie)
    await testbed.collect()
    assert await testbed.outcomes() == {"no-quorum"}
    errors = [event["error"] for event in testbed.log.named("verdict-refused")]
    assert any("the run has no thresholds for miners in" in error for error in errors)


@simulated
async def test_a_verdict_in_another_arithmetic_than_its_summary_is_ignored() -> None:
    testbed = AttackedTrainer()
    await testbed.deliver()
    accepting = testbed.verdict(FIRST)
    entry = testbed.summary(FIRST, accepting, arithmetic="torch-bfloat16")
    await testbed.seal_and_reveal(FIRST, entry, accepting)
    await testbed.collect()
    assert USED not in await testbed.outcomes()


def test_validators_are_compared_by_the_tolerance_of_their_own_arithmetics() -> None:
    proof = proof_of(
        NARROW, WIDE, thresholds(validator="torch-bfloat16", logprob_tolerance=0.4),
        thresholds(miner="torch-bfloat16", validator="torch-bfloat16", logprob_tolerance=0.3),
    )  # fmt: skip
    values = np.linspace(-3.0, -0.5, 5, dtype="<f4")

    def reason(*validators: tuple[Arithmetic, float]) -> str:
        """Return the reason against a group of a miner in bfloat16."""
        verdicts = [
            verdict(judgement(0, logprobs=(values + np.float32(change)).tobytes()), validator=bytes([number]) * 32,
                    miner_arithmetic="torch-bfloat16", validator_arithmetic=arithmetic)
            for number, (arithmetic, change) in enumerate(validators)
        ]  # fmt: skip
        paying = {item.validator for item in verdicts}
        (decision,) = decide(verdicts, 2, set(), proof.logprob_tolerance, paying, lambda group: paying)
        return decision.reason

    for change, agree in ((0.04, True), (0.2, False)):
        assert reason(("torch-float32", 0.0), ("torch-float32", change)) == ("" if agree else LOGPROBS_DISAGREE)
    for change, agree in ((0.2, True), (-0.4, False)):
        assert reason(("torch-bfloat16", 0.0), ("torch-bfloat16", change)) == ("" if agree else LOGPROBS_DISAGREE)
    for change, agree in ((0.4, True), (-0.6, False)):
        assert reason(("torch-float32", 0.0), ("torch-bfloat16", change)) == ("" if agree else LOGPROBS_DISAGREE)


@pytest.fixture(scope="module")
def harness() -> TrialHarness:
    """Return a harness over the packaged policy whose run admits miners in float32 and in bfloat16."""
    weights = load_weights(PACKAGED_POLICY)
    policy_history = PolicyHistory(Policy.load(PACKAGED_POLICY), 0, lambda _: weights)
    proof = proof_of(packaged_thresholds(), packaged_thresholds("torch-bfloat16"))
    return TrialHarness(policy_history, environments.get("addition"), proof, max_tokens=8, groups=16)


def judge_copy(harness: TrialHarness, declared: Arithmetic, bits: int, window: int) -> TrialOutcome:
    """Return the verdict on a window that a miner generates with a copy of the policy."""

    async def scenario() -> TrialOutcome:
        declaring = replace(harness, declaration=declared)
        engine = await declaring.engine(f"{bits} bits", lambda: quantized(load_weights(PACKAGED_POLICY), bits))
        return await declaring.trial(HonestProducer(declaring.task, engine), window)

    return trio.run(scenario)


def test_a_run_that_admits_bfloat16_judges_float32_by_its_own_thresholds(harness: TrialHarness) -> None:
    """A copy with 8-bit weights is refused in its first window where float32 is declared."""
    assert judge_copy(harness, "torch-float32", 8, 0).reasons
    # This is the price of admitting bfloat16: who declares it may be as far off.
    assert not judge_copy(harness, "torch-bfloat16", 8, 0).reasons


@pytest.mark.parametrize("declared", ["torch-float32", "torch-bfloat16"])
def test_a_copy_with_4_bits_is_refused_in_its_first_window_whatever_is_declared(
    harness: TrialHarness, declared: Arithmetic
) -> None:
    assert judge_copy(harness, declared, 4, 0).reasons


def test_a_miner_in_bfloat16_is_accepted_if_it_says_so(harness: TrialHarness) -> None:
    async def scenario(declared: Arithmetic, window: int) -> TrialOutcome:

        engine = TorchEngine(harness.model(), dtype=torch.bfloat16, run_sync=inline)
        await engine.stage(0, load_weights(PACKAGED_POLICY))
        await engine.commit()
        assert (engine.generating_arithmetic, engine.checking_arithmetic) == ("torch-bfloat16", "torch-bfloat16")
        declaring = replace(harness, declaration=declared)
        return await declaring.trial(HonestProducer(declaring.task, engine), window)

    for window in range(3):
        outcome = trio.run(scenario, "torch-bfloat16", window)
        assert (outcome.accepted, outcome.reasons) == (harness.groups, {})
        assert trio.run(scenario, "torch-float32", window).reasons
