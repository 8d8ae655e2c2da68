"""The check of what vLLM computes from a checkpoint, beside engines of torch that compute right or wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from grailnode.engine.torch_engine import TorchEngine
from grailnode.engine.vllm.layout_check import PARAMS, check_layout, probes
from protocol.digest import Weights
from roles.policy.causal_model import CausalModel
from roles.ports import EngineError
from tests.support.builders.families import FAMILIES, Family, write_family
from tests.support.builders.policies import random_weights


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Family:
    return write_family(tmp_path, request.param)


async def check(model: CausalModel, weights: Weights, served: Weights, dtype: torch.dtype, directory: Path) -> None:
    """Check an engine that computes with `served` in place of the weights of a checkpoint."""
    engine = TorchEngine(model, dtype=dtype)
    await engine.stage(0, served)
    await engine.commit()
    requests = probes(model.vocabulary)
    results = await engine.generate(requests, PARAMS)
    save_file(dict(weights), directory / "weights")
    check_layout(model, directory / "weights", [request.prompt for request in requests], results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
async def test_right_computations_pass(family: Family, dtype: torch.dtype, tmp_path: Path) -> None:
    weights = random_weights(family.model)
    await check(family.model, weights, weights, dtype, tmp_path)


FAULTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "heads": ("q_proj.weight", lambda rows: rows.flip(0)),
    "input of the feed-forward": ("up_proj.weight", lambda rows: rows.roll(1, dims=1)),
    "output of the feed-forward": ("down_proj.weight", lambda rows: rows.roll(1, dims=0)),
    "output projection": ("lm_head.weight", lambda rows: rows.roll(1, dims=0)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["qwen3_moe", "mistral", "olmoe"])
async def test_weights_that_are_read_in_another_order_are_refused(name: str, fault: str, tmp_path: Path) -> None:
    family, (part, change) = write_family(tmp_path, name), FAULTS[fault]
    weights = random_weights(family.model)
    served = {name: change(tensor) if name.endswith(part) else tensor for name, tensor in weights.items()}
    what = "log-probabilities" if fault == "output projection" else "hidden states"
    with pytest.raises(EngineError, match=rf"its {what}.* in another layout"):
        await check(family.model, weights, served, torch.bfloat16, tmp_path)
