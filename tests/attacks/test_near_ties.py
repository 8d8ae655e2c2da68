"""Miners in bfloat16 whose sketches are right and whose tokens are wrong only where two of them nearly tie."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import trio

from grailnode.calibration import proof_file
from grailnode.calibration.pairs import CalibrationTask, GroupMeasurement
from grailnode.calibration.procedure import quantized
from grailnode.calibration.variants import Variant
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from protocol import environments
from protocol.judging.evidence import NO_EVIDENCE, advance, count_group, exceeded, is_improbable
from protocol.proof import Thresholds
from protocol.rollout.sampling import NOISE_UNIT, SamplingParams
from tests.support.adversaries.decisive_tokens import DecisiveEngine, Tokens
from tests.support.measuring.pair_measurements import measure

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
        window = count_group(zeros, margins, zeros.astype(bool), [50] * 8, row, zeros.astype(bool))
        return is_improbable(NO_EVIDENCE, [window], row)

    assert next(number for number in range(400) if refused(number)) <= 10
