"""An engine that samples with one engine and computes hidden states with torch, here with torch for both."""

from collections.abc import Sequence

import pytest
import torch

from grailnode.engine.torch_engine import TorchEngine
from grailnode.engine.vllm.torch_prefill import TorchPrefill
from protocol.digest import Weights
from protocol.patch import encode
from protocol.rollout.sampling import SamplingParams
from roles.policy.causal_model import CausalModel
from roles.ports import EngineError, Generation, Request
from tests.engine.engine_contract import EngineContract, NewEngine, changed, manifest
from tests.support.builders.policies import (
    PARAMS,
    engine_of,
    inline,
    random_weights,
    requests_of_many_lengths,
)


class Sampler(TorchEngine):
    """An engine without states, which refuses a version at staging or at the commit."""

    refuses_to = ""

    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        """Return completions whose states have a width of 0."""
        generations = await super().generate(requests, params)
        return [Generation(g.tokens, torch.empty(len(g.tokens), 0), g.logprobs) for g in generations]

    async def stage(self, version: int, weights: Weights) -> None:
        """Stage weights, or refuse them."""
        if self.refuses_to == "stage":
            raise EngineError("no")
        await super().stage(version, weights)

    async def commit(self) -> None:
        """Commit, or fail."""
        if self.refuses_to == "commit":
            raise EngineError("no")
        await super().commit()


def engine_for(model: CausalModel) -> tuple[TorchPrefill, Sampler]:
    """Return an engine and its sampler."""
    sampler = Sampler(model, run_sync=inline)
    return TorchPrefill(sampler, TorchEngine(model, run_sync=inline)), sampler


class TestTorchPrefill(EngineContract):
    """The contract."""

    samples = 1000

    @pytest.fixture
    def new_engine(self, model: CausalModel) -> NewEngine:
        """Make engines."""
        return lambda: engine_for(model)[0]


@pytest.mark.parametrize("fault", ["stage", "commit"])
async def test_both_engines_keep_the_old_version_when_the_sampler_fails(model: CausalModel, fault: str) -> None:
    weights, requests = random_weights(model), requests_of_many_lengths()
    engine, sampler = engine_for(model)
    await engine.stage(0, weights)
    await engine.commit()
    sampler.refuses_to = fault
    with pytest.raises(EngineError):
        await engine.stage(1, random_weights(model, 1))
        await engine.commit()
    sampler.refuses_to = ""
    with pytest.raises(EngineError, match="nothing is staged"):
        await engine.commit()
    reference = await engine_of(model, weights)
    for expected, generation in zip(
        await reference.generate(requests, PARAMS), await engine.generate(requests, PARAMS), strict=True
    ):
        assert generation.tokens == expected.tokens
        torch.testing.assert_close(generation.hidden, expected.hidden)
    target = changed(weights, 1)
    await engine.stage_patch(1, encode(weights, target), manifest(1, target))
    await engine.commit()
    assert engine.version == 1
