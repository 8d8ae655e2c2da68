"""The torch engine serves versions of codes and scales, and computes what it computes with their BF16 values."""

from pathlib import Path

import pytest
import torch

from grailnode.engine.models import build_exact
from grailnode.engine.policy import Policy
from grailnode.engine.torch_engine import TorchEngine
from protocol.digest import Weights
from protocol.patch import encode
from protocol.quantization import SCALE, Precision, dequantize, quantize
from roles.policy.causal_model import CausalModel
from roles.ports import EngineError
from tests.engine.engine_contract import manifest
from tests.support.builders.policies import PARAMS, engine_of, inline, random_weights, requests_of_many_lengths

MATRIX = "model.layers.0.self_attn.q_proj.weight"
PRECISIONS: tuple[Precision, ...] = ("fp8", "int8")


async def results_of(model: CausalModel, weights: Weights, dtype: torch.dtype = torch.float32) -> list[object]:
    """Return the tokens and hidden states of some completions."""
    engine = await engine_of(model, dict(weights), dtype=dtype)
    return [(g.tokens, g.hidden.tolist()) for g in await engine.generate(requests_of_many_lengths(6), PARAMS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
async def test_codes_are_served_as_the_values_that_they_stand_for(
    model: CausalModel, precision: Precision, dtype: torch.dtype
) -> None:
    published = quantize(random_weights(model), precision)
    served = await results_of(model, published, dtype)
    assert served == await results_of(model, dequantize(published), dtype)
    assert served != await results_of(model, random_weights(model), dtype)


async def test_exact_arithmetic_computes_with_codes(directory: Path) -> None:
    exact = build_exact(Policy.load(directory))
    published = quantize(random_weights(exact), "fp8")
    assert await results_of(exact, published) == await results_of(exact, dequantize(published))


@pytest.mark.parametrize("precision", PRECISIONS)
async def test_newer_versions_are_staged_whole(model: CausalModel, precision: Precision) -> None:
    old, new = (quantize(random_weights(model, seed), precision) for seed in (0, 1))
    engine = TorchEngine(model, run_sync=inline)
    takes_patches = [engine.takes_patches]
    await engine.stage(0, old)
    await engine.commit()
    assert [*takes_patches, engine.takes_patches] == [True, False]
    with pytest.raises(EngineError, match="cannot be patched in"):
        await engine.stage_patch(1, encode(old, new), manifest(1, new))
    await engine.stage(1, new)
    await engine.commit()
    assert engine.version == 1


def damaged(published: dict[str, torch.Tensor], fault: str) -> dict[str, torch.Tensor]:
    """Return a version with a fault."""
    codes = published[MATRIX].clone()
    if fault == "no code":
        codes.view(torch.uint8)[3, 5] = 0x7F if codes.dtype == torch.float8_e4m3fn else 0x80
        return published | {MATRIX: codes}
    if fault == "no scales":
        return {name: tensor for name, tensor in published.items() if name != MATRIX + SCALE}
    if fault == "too few scales":
        return published | {MATRIX + SCALE: published[MATRIX + SCALE][1:]}
    return published | {MATRIX: codes[:, 1:].contiguous()}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no code", f"{MATRIX}: a bit pattern that is no code"),
        ("no scales", f"{MATRIX}: codes without a scale"),
        ("too few scales", f"{MATRIX}: codes without a scale"),
        ("another shape", f"{MATRIX}: shape"),
    ],
)
async def test_a_damaged_version_is_refused_and_the_old_one_serves(
    model: CausalModel, precision: Precision, fault: str, message: str
) -> None:
    published = quantize(random_weights(model), precision)
    engine = await engine_of(model, published)
    before = await engine.generate(requests_of_many_lengths(2), PARAMS)
    with pytest.raises(EngineError, match=message):
        await engine.stage(1, damaged(published, fault))
    assert engine.version == 0
    assert [g.tokens for g in await engine.generate(requests_of_many_lengths(2), PARAMS)] == [g.tokens for g in before]
