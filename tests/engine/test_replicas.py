"""Several engines that serve one version: the contract of Engine, and replicas that fail."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from grailnode.engine.compute import Compute, Replicas, open_engine
from grailnode.engine.policy import Policy
from grailnode.engine.torch_engine import TorchEngine
from grailnode.engine.vllm.vllm_server import ChildServer
from grailnode.engine.vllm.vllm_settings import VllmSettings
from protocol.digest import Weights
from protocol.rollout.sampling import SamplingParams
from roles.policy.causal_model import CausalModel
from roles.ports import EngineError, Generation, Request
from tests.engine.engine_contract import EngineContract, NewEngine, changed, check_tokens, serve
from tests.engine.vllm_site import refuse_restarts, vllm_python
from tests.support.builders.policies import PARAMS, inline, random_weights, requests_of_many_lengths


class CountingEngine(TorchEngine):
    """A torch engine that counts its requests, and whose next commit can be made to fail."""

    requests = 0
    fails = False

    async def commit(self) -> None:
        if self.fails:
            self.fails = False
            raise EngineError("the device is out of memory")
        await super().commit()

    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        self.requests += len(requests)
        return await super().generate(requests, params)


@pytest.fixture
def new_engine(model: CausalModel) -> NewEngine:
    return lambda: Replicas([TorchEngine(model, run_sync=inline) for _ in range(3)])


class TestReplicas(EngineContract):
    """The contract of Engine."""


async def test_every_replica_computes_its_part(model: CausalModel) -> None:
    engines = [CountingEngine(model, run_sync=inline) for _ in range(3)]
    replicas, weights = Replicas(engines), random_weights(model)
    await serve(replicas, weights)
    await check_tokens(replicas, model, weights, count=25)
    assert sorted(engine.requests for engine in engines) == [8, 8, 9]
    await replicas.generate(requests_of_many_lengths(1), PARAMS)
    assert sum(engine.requests for engine in engines) == 26


async def test_nothing_is_served_while_replicas_have_different_versions(model: CausalModel) -> None:
    engines = [CountingEngine(model, run_sync=inline) for _ in range(3)]
    replicas, weights = Replicas(engines), random_weights(model)
    target: Weights = changed(weights, 1)
    await serve(replicas, weights)
    await replicas.stage(1, target)
    engines[1].fails = True
    with pytest.raises(EngineError, match="out of memory"):
        await replicas.commit()
    assert (replicas.version, [engine.version for engine in engines]) == (None, [1, 0, 1])
    with pytest.raises(EngineError, match="different versions"):
        await replicas.generate(requests_of_many_lengths(), PARAMS)
    await replicas.stage(1, target)
    await replicas.commit()
    assert replicas.version == 1
    await check_tokens(replicas, model, target)


def test_each_replica_has_gpus_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = VllmSettings(python=tmp_path / "python", device="cuda", ranks=2, replicas=3)

    def gpus(number: int) -> str | None:
        return ChildServer(settings.replica(number), tmp_path, tmp_path).environment().get("CUDA_VISIBLE_DEVICES")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [gpus(number) for number in range(3)] == ["0,1", "2,3", "4,5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2")
    assert [gpus(number) for number in range(3)] == ["7,6", "5,4", "3,2"]
    with pytest.raises(ValueError, match=r"engine\.url"):
        VllmSettings(url="http://127.0.0.1:1", replicas=2)


@pytest.mark.vllm
async def test_two_servers_of_vllm_serve_one_version(policy: Policy, model: CausalModel, tmp_path: Path) -> None:
    settings = VllmSettings(python=vllm_python(), replicas=2, sequences=8)
    compute = Compute(model, vllm=settings, policy=policy.directory, directory=tmp_path)
    weights = random_weights(model)
    target: Weights = changed(weights, 1)
    async with open_engine(compute, inline, refuse_restarts) as engine:
        await serve(engine, weights, target)
        await check_tokens(engine, model, target)
        assert engine.version == 1
    assert (tmp_path / "replica-1" / ChildServer.LOG).exists()
