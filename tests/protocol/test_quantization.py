"""Codes and scales agree with exact fractions, with the golden vectors, and with themselves; bad ones are refused."""

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from protocol import quantization as q
from protocol.chain.verifier import ChainVerifier
from protocol.digest import digest_weights, raw_bytes, type_name
from protocol.errors import ChainError, MalformedError
from protocol.quantization import Precision
from tests.protocol import slow_quantization as slow
from tests.protocol.signed_chain import Trainer, chain, follow
from tests.support.builders.samples import RUN_ID, lora, run_manifest

VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "quantized.json").read_text())
PRECISIONS: tuple[Precision, ...] = ("fp8", "int8")
PLACES = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight")

finite = st.floats(min_value=-1e3, max_value=1e3, width=32)
tiny = st.floats(min_value=-(2.0**-60), max_value=2.0**-60, width=32, allow_subnormal=True)
grid = st.builds(lambda n, k: float(n) * 2.0**k, st.integers(-1024, 1024), st.integers(-20, 4))  # on ties and beside
rows = st.lists(st.one_of(finite, grid, tiny), min_size=1, max_size=8)


def cases(field: str) -> list[Any]:
    return [pytest.param(item, id=item["name"]) for item in VECTORS if field in item]


def codes_of(row: list[float], precision: Precision) -> tuple[torch.Tensor, torch.Tensor]:
    matrix = torch.tensor([row], dtype=torch.float32)
    scales = q.row_scales(matrix, precision)
    return q.encode(matrix, scales, precision), scales


@pytest.mark.parametrize("precision", PRECISIONS)
@given(row=rows)
def test_codes_are_those_of_exact_fractions(precision: Precision, row: list[float]) -> None:
    codes, scales = codes_of(row, precision)
    fractions = [Fraction(weight) for weight in row]
    exponent = slow.exponent_of(fractions, precision)
    assert Fraction(float(scales[0])) == Fraction(2) ** exponent
    assert list(raw_bytes(codes)) == [slow.code_of(weight, exponent, precision) for weight in fractions]
    for dtype in (torch.bfloat16, torch.float32):
        for weight, pattern in zip(q.decode(codes, scales, dtype)[0].tolist(), raw_bytes(codes), strict=True):
            value = slow.value_of(pattern, precision)
            assert value is not None
            assert Fraction(weight) == value * Fraction(2) ** exponent


@pytest.mark.parametrize("precision", PRECISIONS)
@given(row=rows)
def test_rounded_weights_are_rounded_to_themselves(precision: Precision, row: list[float]) -> None:
    once = q.round_matrix(torch.tensor([row], dtype=torch.float32), precision, torch.float32)
    assert torch.equal(q.round_matrix(once, precision, torch.float32), once)
    assert torch.equal(q.round_matrix(once.to(torch.bfloat16), precision, torch.float32), once)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_do_not_depend_on_each_other_or_on_pieces(precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(7, 5, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, 7)[:, None]
    scales = q.row_scales(matrix, precision)
    codes, weights = q.encode(matrix, scales, precision), q.round_matrix(matrix, precision, torch.float32)
    monkeypatch.setattr(q, "_PIECE_ELEMENTS", 10)
    assert torch.equal(q.row_scales(matrix, precision), scales)
    assert raw_bytes(q.encode(matrix, scales, precision)) == raw_bytes(codes)
    assert torch.equal(q.round_matrix(matrix, precision, torch.float32), weights)
    assert torch.equal(q.row_scales(matrix.flip(0), precision).flip(0), scales)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("weight", [math.nan, -math.inf, 2.0**74])
def test_weights_that_no_scale_fits_are_refused(precision: Precision, weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        q.row_scales(torch.tensor([[weight]]), precision)


@pytest.mark.parametrize("item", cases("all_values"))
def test_vectors_of_values(item: dict[str, Any]) -> None:
    dtype = torch.float8_e4m3fn if item["precision"] == "fp8" else torch.int8
    for pattern, text in enumerate(item["all_values"]):
        codes = torch.tensor([[pattern]], dtype=torch.uint8).view(dtype)
        if text is None:
            with pytest.raises(MalformedError, match="no code"):
                q.decode(codes, torch.ones(1, dtype=torch.bfloat16), torch.float32)
        else:
            value = q.decode(codes, torch.ones(1, dtype=torch.bfloat16), torch.bfloat16)
            assert raw_bytes(value).hex() == text
            fraction = slow.value_of(pattern, item["precision"])
            assert fraction is not None
            assert Fraction(float(value)) == fraction


@pytest.mark.parametrize("item", cases("scale"))
def test_vectors_of_scales(item: dict[str, Any]) -> None:
    scales = torch.frombuffer(bytearray.fromhex(item["scale"]), dtype=torch.bfloat16)
    published = {"layers.0.w": torch.zeros(1, 1, dtype=torch.int8), "layers.0.w" + q.SCALE: scales}
    if item["name"].startswith("scale: "):
        with pytest.raises(ChainError, match="no power of two"):
            q.check_scales(published, "here")
    else:
        q.check_scales(published, "here")


def test_scales_of_other_tensors_are_not_checked() -> None:
    nothing = torch.zeros(1, dtype=torch.bfloat16)
    q.check_scales(
        {"w": torch.ones(1, 1, dtype=torch.bfloat16), "w" + q.SCALE: nothing, "x" + q.SCALE: nothing}, "here"
    )


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (4, 4), True),
        ("gpt_neox.layers.11.attention.query_key_value.weight", (4, 4), True),
        ("transformer.h.3.mlp.c_fc.weight", (4, 4), True),
        ("layers.0.mlp.experts.7.gate_proj.weight", (4, 4), True),
        ("model.layers.0.mlp.gate.weight", (4, 4), False),
        ("model.layers.0.self_attn.q_proj.bias", (4,), False),
        ("model.layers.0.conv.weight", (4, 1, 3), False),
        ("model.embed_tokens.weight", (4, 4), False),
        ("lm_head.weight", (4, 4), False),
        ("model.layers.norm.weight", (4, 4), False),
        ("model.sublayers.0.weight", (4, 4), False),
        ("model.graph.0.weight", (4, 4), False),
    ],
)
def test_which_tensors_are_matrices(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert q.is_matrix(name, shape) is expected


def weights_of(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = dict.fromkeys(PLACES, (6, 4)) | {"model.norm.weight": (4,), "model.embed_tokens.weight": (9, 4)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("precision", ["bf16", *PRECISIONS])
def test_a_version_and_its_parts(precision: Precision) -> None:
    weights = weights_of()
    published = q.quantize(weights, precision)
    table = {name: (type_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in published.items()}
    assert table == q.published_outline(precision, {name: tuple(tensor.shape) for name, tensor in weights.items()})
    for name, tensor in published.items():  # one at a time, as in files of one tensor each
        (part,) = q.published_tensors(weights, precision, [name]).values()
        assert raw_bytes(part) == raw_bytes(tensor)
    restored = q.dequantize(published)
    assert restored.keys() == weights.keys()
    assert all(tensor.dtype == torch.bfloat16 for tensor in restored.values())
    assert digest_weights(q.dequantize(q.quantize(restored, precision))) == digest_weights(restored)
    wide = q.dequantize(published, torch.float32)
    assert all(torch.equal(wide[name], tensor.to(torch.float32)) for name, tensor in restored.items())


def test_codes_without_scales_are_refused() -> None:
    published = q.quantize(weights_of(), "fp8")
    with pytest.raises(MalformedError, match="without a scale"):
        q.dequantize({name: tensor for name, tensor in published.items() if not name.endswith(q.SCALE)})
    with pytest.raises(MalformedError, match="without a scale"):
        q.dequantize(published | {PLACES[0] + q.SCALE: torch.ones(5, dtype=torch.bfloat16)})


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.bfloat16], ids=str)
def test_codes_in_a_run_of_bf16_weights_are_refused_like_other_damage(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Such a run's tables may have any dtypes, so that these tensors come as far as here."""
    published = {"w": torch.zeros(shape, dtype=torch.int8), "w" + q.SCALE: torch.ones(shape[:1], dtype=dtype)}
    with pytest.raises(MalformedError, match="without a scale"):
        q.dequantize(published)
    if dtype == torch.bfloat16:
        q.check_scales(published, "here")
    else:
        with pytest.raises(ChainError, match="not BF16"):
            q.check_scales(published, "here")


Table = dict[str, tuple[str, tuple[int, ...]]]
TABLE: Table = {
    name: (dtype, tuple(shape))
    for name, (dtype, shape) in q.published_outline(
        "fp8", {name: tuple(tensor.shape) for name, tensor in weights_of().items()}
    ).items()
}


def tuples(table: Table) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    return tuple((name, *table[name]) for name in sorted(table))


@pytest.mark.parametrize(
    "changes",
    [
        {PLACES[0]: ("BF16", (6, 4))},
        {PLACES[0]: ("I8", (6, 4))},
        {PLACES[0]: ("F8_E5M2", (6, 4))},
        {PLACES[0] + "_scale": ("F32", (6,))},
        {PLACES[0] + "_scale": ("BF16", (5,))},
        {PLACES[0] + "_scale": ("BF16", (6, 1))},
        {PLACES[0] + "_scale": None},
        {PLACES[0]: None},
        {"model.norm.weight": ("F32", (4,))},
        {"model.embed_tokens.weight": ("F8_E4M3", (9, 4))},
        {"model.embed_tokens.weight_scale": ("F8_E4M3", (9,))},
    ],
    ids=str,
)
def test_other_tables_are_refused(changes: dict[str, Any]) -> None:
    q.check_table("fp8", tuples(TABLE), "here")
    table = {name: row for name, row in (TABLE | changes).items() if row is not None}
    q.check_table("bf16", tuples(table), "here")
    if changes == {PLACES[0]: None}:  # what is left is a BF16 tensor of one dimension
        q.check_table("fp8", tuples(table), "here")
        return
    with pytest.raises(ChainError, match="not the table of a version in fp8"):
        q.check_table("fp8", tuples(table), "here")


def test_a_version_of_another_precision_is_refused_by_its_manifest() -> None:
    """Nothing of the version has been fetched then."""
    whole, trainer = chain(2), Trainer().add(tensors=tuples(TABLE)).add(tensors=tuples(TABLE))
    follow(ChainVerifier(RUN_ID, run_manifest(precision="fp8")), trainer)
    for signed, precision in ((whole, "fp8"), (trainer, "int8")):
        with pytest.raises(ChainError, match="not the table of a version"):
            follow(ChainVerifier(RUN_ID, run_manifest(precision=precision)), signed)


def test_a_run_is_quantized_or_has_adapters() -> None:
    assert run_manifest(lora=lora()).sites_refusal == run_manifest(lora=lora(), precision="bf16").sites_refusal != ""
    assert "quantized" in run_manifest(precision="int8").sites_refusal
    assert run_manifest().sites_refusal == ""
    with pytest.raises(ValidationError, match="adapters that are quantized"):
        run_manifest(lora=lora(), precision="int8")
    with pytest.raises(ValidationError, match="precision"):
        run_manifest(precision="fp4")
