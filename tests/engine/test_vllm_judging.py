"""A validator whose engine is vLLM judges honest and cheating miners right, with the real vLLM."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from grailnode.engine.models import build
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from grailnode.engine.vllm.vllm_engine import VllmEngine
from protocol import environments
from protocol.proof import Arithmetic
from tests.engine.engine_contract import serve
from tests.engine.vllm_site import refuse_restarts, shared_server
from tests.support.adversaries.harness import PolicyHistory, TrialHarness
from tests.support.adversaries.miners import ADVERSARIES
from tests.support.builders.proofs import LENIENT, packaged_thresholds, proof_of, with_thresholds

CHEATS = (
    *("own noise", "special tokens", "one edited token in 10% of rollouts", "tokens outside the vocabulary"),
    *("forced end of sequence", "draft model of half the depth, full prefill", "4-bit weights", "one layer skipped"),
    *("random sketch", "sketch of another position", "prompt tampered with, the due one shown", "false reward"),
)
MINER: Arithmetic = "torch-float32"
VALIDATOR: Arithmetic = "vllm-float32"

pytestmark = pytest.mark.vllm


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[TrialHarness]:
    """Return a harness whose miners compute with torch, and whose validator does with vLLM."""
    policy, weights = Policy.load(PACKAGED_POLICY), load_weights(PACKAGED_POLICY)
    server = shared_server(PACKAGED_POLICY, tmp_path / "server")
    engine = VllmEngine(build(policy), server, tmp_path / "engine", report=refuse_restarts)
    try:
        await serve(engine, weights)
        rows = packaged_thresholds(MINER, VALIDATOR), packaged_thresholds(VALIDATOR, VALIDATOR)
        yield TrialHarness(
            PolicyHistory(policy, 0, lambda version: weights),
            environments.get("addition"),
            proof_of(*rows, miners=(MINER,)),
            max_tokens=8,
            groups=10,
            declaration=MINER,
            judging_engine=engine,
        )
    finally:
        await engine.close()
        server.end()


async def test_honest_miners_are_accepted_and_cheats_refused_for_what_they_did(harness: TrialHarness) -> None:
    for window in range(3):
        outcome = await harness.honest_trial(harness.miner, window)
        assert (outcome.accepted, outcome.reasons) == (harness.groups, {})
    for name in CHEATS:
        outcome = await harness.trial(ADVERSARIES[name].producer(harness), 0)
        assert ADVERSARIES[name].explains(outcome.reasons), (name, outcome.reasons)


async def test_rollouts_are_continued_from_their_first_miss(harness: TrialHarness) -> None:
    lenient = replace(harness, proof=with_thresholds(harness.proof, **LENIENT))
    outcome, expected = await lenient.luck(ADVERSARIES["forced end of sequence"].producer(lenient), 0)
    assert outcome == expected
    assert outcome.counts.luck.trials
