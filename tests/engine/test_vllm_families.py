"""Policies of several architectures are patched in place in the real vLLM, and read back bit by bit."""

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grailnode.engine.hf import TransformersModel
from grailnode.engine.vllm.server_launcher import ServerLauncher
from grailnode.engine.vllm.vllm_engine import VllmEngine
from grailnode.engine.vllm.vllm_settings import VllmSettings
from roles.ports import EngineError, Request
from tests.engine.engine_contract import changed, check_like_torch, serve
from tests.engine.vllm_site import ForkedServer, check_refusal, new_launcher, shared_server, vllm_python
from tests.support.builders.policies import PARAMS, random_weights

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True, "head_dim": None, "num_attention_heads": 2},
    "qwen3": {"tie_word_embeddings": False},
    "llama": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": None},
    "olmo2": {"head_dim": None, "num_attention_heads": 2},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "tie_word_embeddings": False,
    },
    "gemma3_text": {"query_pre_attn_scalar": 32, "sliding_window": 64},
}


def model_of(directory: Path, family: str) -> TransformersModel:
    values = {name: value for name, value in (SIZES | FAMILIES[family]).items() if value is not None}
    config = AutoConfig.for_model(family, **values)
    mapping: Any = AutoModelForCausalLM._model_mapping
    config.architectures = [mapping[type(config)].__name__]
    config.dtype = "bfloat16"
    config.save_pretrained(directory)
    return TransformersModel(directory)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerLauncher]:
    """Return the launcher of all servers of this file but one."""
    launcher = new_launcher(tmp_path_factory.mktemp("launcher"))
    yield launcher
    launcher.close()


class PlainServer(ForkedServer):
    """A vLLM of somebody else.

    Args:
        missing: the flags without which it was started, as its operator does not load all of our code.
        added: further flags.
    """

    def __init__(self, model: Path, launcher: ServerLauncher, missing: Sequence[str], added: Sequence[str]) -> None:
        super().__init__(VllmSettings(python=vllm_python()), model, model / "server", launcher)
        self._missing, self._added = missing, added

    def flags(self, socket: str) -> list[str]:
        words = super().flags(socket)
        for flag in self._missing:
            place = words.index(flag)
            del words[place : place + 2]
        return [*words, *self._added]


def engine_in(directory: Path, model: Any, launcher: ServerLauncher, **settings: Any) -> VllmEngine:
    server = ForkedServer(VllmSettings(python=vllm_python(), **settings), directory, directory / "server", launcher)
    return VllmEngine(model, server, directory / "engine")


@pytest.mark.parametrize(("family", "ranks"), [*((family, 1) for family in FAMILIES), ("qwen3", 2)])
async def test_a_family_is_patched_and_generates_as_transformers(
    family: str, ranks: int, tmp_path: Path, launcher: ServerLauncher
) -> None:
    model = model_of(tmp_path, family)
    weights = random_weights(model)
    target = changed(weights, 1, 0.3)
    engine = engine_in(tmp_path, model, launcher, ranks=ranks)
    try:
        await serve(engine, weights, target)
        await engine.verify()
        await check_like_torch(engine, model, target)
    finally:
        await engine.close()


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_kernel_that_reads_experts_in_another_order_is_refused(restarted: bool, tmp_path: Path) -> None:
    """All tensors read back right: the map that writes them reads them, too."""
    model = model_of(tmp_path, "qwen3_moe")
    weights = random_weights(model)
    server = shared_server(tmp_path, tmp_path / "server")
    engine = VllmEngine(model, server, tmp_path / "engine")
    try:
        if restarted:
            await serve(engine, weights, changed(weights, 1))
            assert (await engine.verify()).tensors == len(weights)
            assert server.process_id is not None
            os.killpg(server.process_id, signal.SIGKILL)
        server.exchange_layouts()
        with pytest.raises(EngineError, match=r"its hidden states differ by .* in another layout"):
            await (engine.generate([Request((5,), bytes(16))], PARAMS) if restarted else serve(engine, weights))
        with pytest.raises(EngineError, match=r"in another layout|no policy has been committed"):
            await engine.generate([Request((5,), bytes(16))], PARAMS)
        assert restarted or not list((tmp_path / "engine").iterdir())  # or each attempt would leave a checkpoint
    finally:
        await engine.close()
        server.end()


@pytest.mark.parametrize(
    ("missing", "added", "reason"),
    [
        (("--logits-processors", "--worker-extension-cls"), (), "does not answer as a grailnode engine"),
        (("--logits-processors",), (), "has not loaded our logits processor"),
        ((), ("--quantization", "fp8"), "fp8"),
        ((), ("--pipeline-parallel-size", "2"), "--pipeline-parallel-size 2: pipeline parallelism"),
    ],
)
async def test_a_server_that_computes_otherwise_or_without_our_code_is_refused(
    tmp_path: Path, launcher: ServerLauncher, missing: Sequence[str], added: Sequence[str], reason: str
) -> None:
    model = model_of(tmp_path, "qwen3")
    engine = VllmEngine(model, PlainServer(tmp_path, launcher, missing, added), tmp_path / "engine")
    await check_refusal(engine, random_weights(model), reason)


async def test_a_policy_of_another_architecture_is_refused_at_start(tmp_path: Path, launcher: ServerLauncher) -> None:
    model = model_of(tmp_path, "llama")
    weights = random_weights(model) | {"model.layers.0.mlp.extra.weight": torch.zeros(3, 3, dtype=torch.bfloat16)}

    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    larger = SimpleNamespace(shapes=shapes, vocabulary=model.vocabulary)
    engine = engine_in(tmp_path, larger, launcher)
    await check_refusal(engine, weights, r"mlp\.extra")
