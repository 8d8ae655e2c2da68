"""An exact run: whatever a miner changes shows in its first window, and what is accepted is what the policy says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from grailnode.calibration.procedure import quantized
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from protocol import environments
from protocol.digest import Weights
from protocol.judging.verdict import Reason
from protocol.proof import DECADE, EXACT_PROOF
from protocol.rollout.batch import Group, assemble
from roles.policy.sequences import Tokens
from tests.support.adversaries.harness import PolicyHistory, TrialHarness, TrialOutcome
from tests.support.adversaries.miners.policies import other_policy
from tests.support.adversaries.miners.registry import Attempt, Behaviour
from tests.support.builders.proofs import with_thresholds
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
