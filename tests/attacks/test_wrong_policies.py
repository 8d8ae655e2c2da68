"""Miners that compute with another policy, or decide near ties: what exact runs and runs in bfloat16 refuse."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import trio
from pydantic import ValidationError

from grailnode.calibration import proof_file
from grailnode.calibration.pairs import CalibrationTask, GroupMeasurement
from grailnode.calibration.procedure import quantized
from grailnode.calibration.variants import Variant
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from protocol import environments
from protocol.digest import Weights
from protocol.judging.evidence import NO_EVIDENCE, advance, count_values, exceeded, is_improbable, trial_values
from protocol.judging.verdict import Reason
from protocol.proof import DECADE, EXACT_PROOF, Thresholds
from protocol.rollout.batch import Group, assemble
from protocol.rollout.sampling import NOISE_UNIT, SamplingParams
from roles.policy.sequences import Tokens
from tests.support.adversaries.decisive_tokens import DecisiveEngine
from tests.support.adversaries.harness import PolicyHistory, TrialHarness, TrialOutcome
from tests.support.adversaries.miners.policies import other_policy
from tests.support.adversaries.miners.registry import Attempt, Behaviour
from tests.support.builders.proofs import with_thresholds
from tests.support.measuring.pair_measurements import measure
from tests.support.simulation.virtual_clock import simulate


def older(weights: Weights, versions: int) -> Weights:
    """Return the weights some versions ago: in each step a hundredth of them moves by one unit in the last place."""
    generator = torch.Generator().manual_seed(7)
    result = {name: tensor.clone() for name, tensor in weights.items()}
    for _ in range(versions):
        for tensor in result.values():
            mask = torch.rand(tensor.shape, generator=generator) < 0.01
            tensor.view(torch.int16)[mask] += 1
    return result


@pytest.fixture(scope="module")
def harness() -> TrialHarness:
    """Return a harness over the packaged policy in exact arithmetic; version 8 serves."""
    weights = load_weights(PACKAGED_POLICY)
    policy_history = PolicyHistory(
        Policy.load(PACKAGED_POLICY), 8, lambda version: weights if version == 8 else older(weights, 8 - version)
    )
    task = environments.get("addition")
    return TrialHarness(policy_history, task, EXACT_PROOF, max_tokens=8, groups=16, exact=True)


def right_prefill(name: str, make: Callable[[TrialHarness], Weights], temperature: float = 1.0) -> Behaviour:
    """Return a miner that draws tokens with other weights, and computes the sketches by one right prefill."""

    async def behaviour(attempt: Attempt) -> list[Group]:
        engine = await attempt.harness.engine(name, lambda: make(attempt.harness))
        return [
            await attempt.complete(item, await attempt.completions(item, item.seeds, temperature, engine))
            for item in attempt.assignments
        ]

    return behaviour


async def flipped_token(attempt: Attempt) -> list[Group]:
    """Replace one token of the whole window by the next best one, and go on from there by the policy's own choice."""
    groups = await attempt.honest_groups()
    completions: list[Tokens] = [rollout.tokens for rollout in groups[0].rollouts]
    tokens = completions[0]
    other = 2 if tokens[0] != 2 else 3
    completions[0] = (other, *tokens[1:])
    return [await attempt.complete(attempt.assignments[0], completions), *groups[1:]]


CHEATS: dict[str, Behaviour] = {
    "one flipped token": flipped_token,
    "8-bit weights": other_policy("8 bits", lambda harness: quantized(harness.serving_weights, 8)),
    "4-bit weights": other_policy("4 bits", lambda harness: quantized(harness.serving_weights, 4)),
    "eight versions old": other_policy("old", lambda harness: older(harness.serving_weights, 8)),
    "one version old": other_policy("older", lambda harness: older(harness.serving_weights, 1)),
    "4-bit decode, right prefill": right_prefill("4 bits", lambda harness: quantized(harness.serving_weights, 4)),
    "temperature 0.9": right_prefill("serving", lambda harness: harness.serving_weights, temperature=0.9),
}


def judge(harness: TrialHarness, behaviour: Behaviour) -> tuple[list[Group], TrialOutcome]:
    """Return the groups of the first window, and the verdict on them."""

    async def scenario() -> tuple[list[Group], TrialOutcome]:
        harness.accepted_work.clear()
        groups = await behaviour(Attempt(harness, harness.mining_window(0), range(harness.groups)))
        return groups, await harness.judge(*assemble(groups, "exact"), harness.miner)

    result: tuple[list[Group], TrialOutcome] = simulate(scenario)
    return result


@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS)
def test_a_cheat_is_refused_in_its_first_window(harness: TrialHarness, cheat: Behaviour) -> None:
    _, outcome = judge(harness, cheat)
    assert outcome.reasons
    assert set(outcome.reasons) <= {Reason.SKETCH, Reason.SAMPLING, Reason.WINDOW}


def test_honest_work_is_accepted_whole(harness: TrialHarness) -> None:
    _, outcome = judge(harness, Attempt.honest_groups)
    assert (outcome.accepted, outcome.reasons) == (harness.groups, {})
    assert outcome.counts.sketch.steps == outcome.counts.margin.steps == (0,)


def test_an_exact_run_tolerates_nothing_and_has_no_filters(harness: TrialHarness) -> None:
    run = harness.task.run
    proofs = [with_thresholds(run.proof, threshold=10 * DECADE), with_thresholds(run.proof, logprob_tolerance=1)]
    changes: list[dict[str, Any]] = [{"proof": proof} for proof in proofs]
    for change in (*changes, {"sampling": run.sampling.model_copy(update={"top_k": 5})}):
        with pytest.raises(ValidationError, match="filters" if "sampling" in change else "tolerate something"):
            type(run)(**(dict(run) | change))


# Miners in bfloat16 whose sketches are right and whose tokens are wrong only where two of them nearly tie


GROUPS = 64
BFLOAT16 = Variant(dtype="bfloat16")
POLICY = Policy.load(PACKAGED_POLICY)
ADDITION = environments.get("addition")
TASK = CalibrationTask(
    policy=POLICY,
    params=SamplingParams(temperature=1.0, max_tokens=8, stops=POLICY.stops),
    group_size=8,
    prompt=lambda seed: ADDITION.problem(seed).prompt,
    seed=7,
)


@pytest.fixture(scope="module")
def row() -> Thresholds:
    """Return the packaged thresholds where miner and validator compute in bfloat16."""
    return proof_file.read(PACKAGED_POLICY / proof_file.NAME).row("torch-bfloat16", "torch-bfloat16")


def judged(generating: Any, groups: int = GROUPS) -> list[GroupMeasurement]:
    """Return measurements of groups that a miner generates and a validator in bfloat16 checks, with right sketches.

    Args:
        generating: an engine, or weights that the miner computes in bfloat16.
    """

    async def scenario() -> list[GroupMeasurement]:
        weights = load_weights(PACKAGED_POLICY)
        miner = await BFLOAT16.serve(POLICY, generating) if isinstance(generating, dict) else generating
        validator = await BFLOAT16.serve(POLICY, weights)
        return [group async for group in measure(TASK, miner, validator, groups)]

    return [replace(group, distances=group.distances * 0) for group in trio.run(scenario)]


def tokens_until_refusal(groups: Sequence[GroupMeasurement], row: Thresholds) -> int | None:
    """Return the tokens after which windows of one group refuse the miner; None if they never do."""
    evidence, tokens = NO_EVIDENCE, 0
    for counts in (group.counts(row) for group in groups):
        evidence, tokens = advance(evidence, counts, row), tokens + counts.margin.trials
        if exceeded(evidence, row):
            return tokens
    return None


def test_a_4_bit_decode_with_right_sketches_in_bfloat16_is_refused(row: Thresholds) -> None:
    tokens = tokens_until_refusal(judged(quantized(load_weights(PACKAGED_POLICY), 4)), row)
    assert tokens is not None
    assert tokens <= 1500


def test_honest_work_in_bfloat16_is_accepted(row: Thresholds) -> None:
    assert tokens_until_refusal(judged(dict(load_weights(PACKAGED_POLICY))), row) is None


def right_answer(prompt: Tokens, completion: Tokens) -> int | None:
    first, second = (int(number) for number in POLICY.tokenizer.decode(prompt).strip("= ").split("+"))
    answer = POLICY.tokenizer.encode(str(first + second))
    return answer[len(completion)] if completion == answer[: len(completion)] and completion != answer else None


def test_a_miner_that_decides_the_near_ties_of_its_answers_is_refused(row: Thresholds) -> None:
    """It has the right policy and writes the right digits where they fall short of the drawn ones by at most 1."""
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_weights(PACKAGED_POLICY).items()}
    miner = DecisiveEngine(BFLOAT16.model(POLICY), weights, right_answer, reach=1.0)
    groups = judged(miner, 32)
    assert miner.decided > 0
    assert tokens_until_refusal(groups, row) is not None


@pytest.mark.parametrize("shortfall", [0.3, 1.0])
def test_a_window_has_a_budget_for_near_ties_that_are_decided(row: Thresholds, shortfall: float) -> None:
    """400 tokens, the others of which are without any margin: the best case for the miner."""
    zeros = np.zeros(400, dtype=np.uint8)

    def refused(decided: int) -> bool:
        margins = np.where(np.arange(400) < decided, round(shortfall / NOISE_UNIT), 0)
        window = count_values(trial_values(zeros, margins, zeros.astype(bool), [50] * 8, zeros.astype(bool)), row)
        return is_improbable(NO_EVIDENCE, [window], row)

    assert next(number for number in range(400) if refused(number)) <= 10
