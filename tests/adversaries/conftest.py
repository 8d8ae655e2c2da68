"""A harness over the packaged policy, small enough for the tests; bench/proofs has a larger one."""

import pytest
import torch
import trio

from grailnode.engine.models import build
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from protocol import environments
from protocol.rollout.sampling import SamplingParams
from tests.support.adversaries.harness import PolicyHistory, TrialHarness
from tests.support.adversaries.reinforcement import ReinforcementTask, reinforce
from tests.support.builders.proofs import packaged_thresholds, proof_of

VERSIONS = 3
MAX_TOKENS = 8


@pytest.fixture(scope="session")
def harness() -> TrialHarness:
    """Return a harness over `addition`, whose policy has been reinforced for a few versions."""
    torch.set_num_threads(1)
    policy, start = Policy.load(PACKAGED_POLICY), load_weights(PACKAGED_POLICY)
    params = SamplingParams(1.0, MAX_TOKENS, policy.stops)
    task = ReinforcementTask(
        environments.get("addition"), policy.tokenizer, params, groups=8, group_size=8, learning_rate=7e-6
    )
    versions = [start]

    async def learn() -> None:
        async for _, weights in reinforce(build(policy), start, task, VERSIONS, seed=0):
            versions.append(weights)

    trio.run(learn)
    policy_history = PolicyHistory(policy, VERSIONS, lambda version: versions[version])
    proof = proof_of(packaged_thresholds())
    return TrialHarness(policy_history, task.environment, proof, MAX_TOKENS, groups=10, training_windows=3)
