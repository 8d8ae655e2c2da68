"""Miners that declare another arithmetic than theirs, or change what they declare, to be judged by wider thresholds."""

from dataclasses import replace

import numpy as np
import pytest
import trio

from grailnode.calibration.procedure import quantized
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from protocol import environments
from protocol.judging.accounts import Accounts
from protocol.judging.evidence import Counts, Evidence, is_improbable
from protocol.proof import Arithmetic
from roles.miner.produce import HonestProducer
from roles.trainer.collect.quorum import LOGPROBS_DISAGREE, LogprobRule, decide
from roles.trainer.verified_batch import USED
from roles.validator.window_cases import Pledge, read_window_cases
from tests.support.adversaries.harness import PolicyHistory, TrialHarness, TrialOutcome
from tests.support.attacked_nodes.trainer import FIRST, SECOND, WINDOW, AttackedTrainer, make_honest_testbed
from tests.support.attacked_nodes.validator import AttackedValidator
from tests.support.builders import samples
from tests.support.builders.chains import MINER
from tests.support.builders.proofs import packaged_thresholds, proof_of
from tests.support.builders.samples import counts, judgement, row, summary, table, thresholds, verdict

NARROW = thresholds()
WIDE = thresholds(
    miner="torch-bfloat16", margin=table((10_000,), (2e-3,), *[(1.0,), (2.0,)] * 2), logprob_tolerance=500_000
)  # fmt: skip
MIXED = proof_of(NARROW, WIDE)
ROWS = {item.miner: item for item in (NARROW, WIDE)}
MISS, CLEAN = counts(margin=(24, 1)), counts(WIDE, margin=(400,))

Windows = list[tuple[Arithmetic, Counts]]


def evidence_after(windows: Windows, declared: Arithmetic) -> Evidence:
    """Return the evidence under a declaration after accepted windows, each with its own declaration."""
    entries = [
        summary(row(arithmetic=own, counts=counted), window=window) for window, (own, counted) in enumerate(windows)
    ]
    return Accounts.of(entries, samples.SCORING, MIXED).evidence_of(samples.MINER.public, declared)


def windows_until_refusal(before: Windows, declared: Arithmetic) -> int:
    """Return at which of further windows with a miss the miner is refused."""
    evidence = evidence_after(before, declared)
    missing = counts(ROWS[declared], margin=(24, 1))
    return next(n for n in range(1, 1000) if is_improbable(evidence, [missing] * n, ROWS[declared]))


def test_clean_windows_under_wide_thresholds_do_not_lower_the_evidence_under_narrow_ones() -> None:
    alone = windows_until_refusal([], "torch-float32")
    misses: Windows = [("torch-float32", MISS)] * (alone - 1)
    assert alone > 2
    assert windows_until_refusal(misses, "torch-float32") == 1
    wide: Windows = [("torch-bfloat16", CLEAN)] * 40
    narrow: Windows = [("torch-float32", CLEAN)] * 40
    assert windows_until_refusal([*misses, *wide], "torch-float32") == 1
    assert windows_until_refusal([*misses, *narrow], "torch-float32") == alone
    # Each declaration begins with no evidence: a miner gains one threshold for each arithmetic that the run admits.
    assert windows_until_refusal(misses, "torch-bfloat16") == windows_until_refusal([], "torch-bfloat16")


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
        NARROW, WIDE, thresholds(validator="torch-bfloat16", logprob_tolerance=400_000),
        thresholds(miner="torch-bfloat16", validator="torch-bfloat16", logprob_tolerance=300_000),
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
        (decision,) = decide(verdicts, 2, set(), LogprobRule(proof), paying, lambda group: paying)
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
