"""Calibration with the real vLLM on one side of a pair."""

from pathlib import Path

import pytest

from grailnode.calibration.pairs import CalibrationTask
from grailnode.calibration.variants import Variant, VllmServers, VllmVariant, run_pairs
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from grailnode.engine.vllm.installation import installed_version
from protocol import environments
from protocol.rollout.sampling import SamplingParams
from tests.engine.vllm_site import vllm_python
from tests.support.measuring.pair_measurements import measure_pair


@pytest.mark.vllm
async def test_a_pair_with_vllm_is_measured(tmp_path: Path) -> None:
    """vLLM in float32 is as far from torch as another batch is, and serves a copy as well as the policy."""
    policy, weights = Policy.load(PACKAGED_POLICY), load_weights(PACKAGED_POLICY)
    prompts = environments.get("addition")
    work = CalibrationTask(policy, SamplingParams(1.0, 8, policy.stops), 8, lambda seed: prompts.problem(seed).prompt)
    python = vllm_python()
    pair = run_pairs(VllmVariant(python, tmp_path, installed_version(python)), Variant())[0]
    assert str(pair.generating).startswith("vllm 0.")

    servers = VllmServers()
    try:
        honest = [group async for group in measure_pair(work, pair, weights, 8, servers=servers)]
        other = {name: tensor * 1.05 for name, tensor in weights.items()}
        copied = [group async for group in measure_pair(work, pair, weights, 8, copy=other, servers=servers)]
    finally:
        await servers.close()

    assert max(float(group.shifts.max()) for group in honest) < 0.001
    assert max(float(group.shifts.max()) for group in copied) > 0.001
