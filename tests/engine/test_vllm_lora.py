"""A LoRA run on the real vLLM: the base is loaded once, adapters are patched in place in vLLM's own LoRA layers."""

import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from grailnode.engine.lora_model import LoraModel, initial_adapters
from grailnode.engine.models import build
from grailnode.engine.policy import Policy, load_weights
from grailnode.engine.vllm.vllm_engine import VllmEngine
from grailnode.run.base_files import lora_spec
from protocol.lora import LoraSpec
from protocol.patch import encode
from roles.ports import EngineError
from tests.engine.engine_contract import changed, check_like_torch, check_tokens, manifest, serve
from tests.engine.vllm_site import BendableServer, refuse_restarts, shared_server

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def lora(policy: Policy) -> LoraSpec:
    """Return adapters with a factor that BF16 cannot multiply exactly, and a rank that vLLM fills up with zeros."""
    return lora_spec(load_weights(policy.directory), 3, 5.2, ("down_proj", "q_proj", "self_attn.v_proj"))


@pytest.fixture(scope="module")
def model(policy: Policy, lora: LoraSpec) -> LoraModel:
    return LoraModel(build(policy, lora=lora), load_weights(policy.directory))


@pytest.fixture(scope="module")
def server(policy: Policy, lora: LoraSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BendableServer]:
    server = shared_server(policy.directory, tmp_path_factory.mktemp("server"), lora=lora)
    yield server
    server.end()


@pytest.fixture
async def engine(model: LoraModel, server: BendableServer, tmp_path: Path) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(model, server, tmp_path)
    yield engine
    await engine.close()


def adapters(model: LoraModel, seed: int) -> dict[str, Tensor]:
    """Return adapters that change most tokens."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * 0.3).to(torch.bfloat16) for name, shape in model.shapes.items()
    }


async def test_adapters_are_patched_and_generate_as_the_torch_engine(engine: VllmEngine, model: LoraModel) -> None:
    engine._report = refuse_restarts
    first = adapters(model, 0)
    second = changed(first, 1)
    third = adapters(model, 2)
    await serve(engine, first)
    completions = []
    for version, (old, new) in enumerate([(first, second), (second, third)], 1):
        await engine.stage_patch(version, encode(old, new), manifest(version, new))
        await engine.commit()
        completions.append(await check_like_torch(engine, model, new, count=100))
    assert completions[0] != completions[1]
    assert (await engine.verify()).tensors == len(model.shapes)


async def test_a_killed_server_and_changed_memory_are_replaced_with_base_and_adapters(
    engine: VllmEngine, model: LoraModel, server: BendableServer
) -> None:
    first, second = adapters(model, 0), adapters(model, 2)
    await serve(engine, first, second)
    assert server.process_id is not None
    os.killpg(server.process_id, signal.SIGKILL)
    await check_tokens(engine, model, second)
    names = ("model.layers.1.mlp.up_proj.weight", next(iter(model.shapes)))
    for name in names:  # of the base, which no patch changes, and of the adapters
        await server.bend(name)
        assert (await engine.verify()).different == (name,)
        await check_tokens(engine, model, second)


async def test_a_kernel_that_reads_adapters_in_another_order_is_refused_at_version_0(
    policy: Policy, lora: LoraSpec, model: LoraModel, tmp_path: Path
) -> None:
    """The adapters of version 0 change nothing, in whatever order they are read."""
    server = shared_server(policy.directory, tmp_path / "server", lora=lora)
    engine = VllmEngine(model, server, tmp_path / "engine")
    server.exchange_layouts()
    try:
        with pytest.raises(EngineError, match=r"its hidden states differ by .* in another layout"):
            await serve(engine, initial_adapters(model.shapes))
    finally:
        await engine.close()
        server.end()
