"""The golden vectors of docs/spec/quantized.md.

Weights are float32 and scales and values BF16, each as the hexadecimal digits of its little-endian bytes.
"""

import struct
from typing import Final

import torch

from protocol.digest import digest_weights, raw_bytes, type_name
from protocol.quantization import Precision, decode, encode, quantize, row_scales
from tests.vectors.cases import Case

PRECISIONS: Final[tuple[Precision, ...]] = ("fp8", "int8")
LARGEST: Final = {"fp8": 448.0, "int8": 127.0}


def page() -> list[Case]:
    """Build cases of codes' values, of rows that are quantized, of weights that are refused, and of a digest."""
    cases: list[Case] = []
    for precision in PRECISIONS:
        cases += [_values(precision), *(_row(name, precision, row) for name, row in _rows(precision).items())]
        cases += [
            {"name": f"{precision}: {name}", "precision": precision, "row": [_hex(weight)], "error": "ValueError"}
            for name, weight in (("NaN", float("nan")), ("infinity", float("-inf")), ("too large", 2.0**74))
        ]
        cases.append(_version(precision))
    bits = {"zero": 0, "negative": 0xBF80, "NaN": 0x7FC0, "infinity": 0x7F80, "three": 0x4040, "2^65": (127 + 65) << 7}
    bits |= {"2^-65": (127 - 65) << 7, "negative zero": 0x8000, "a subnormal": 0x0040}
    cases += [{"name": f"scale: {name}", "scale": struct.pack("<H", value).hex()} for name, value in bits.items()]
    return cases


def _rows(precision: Precision) -> dict[str, list[float]]:
    largest = LARGEST[precision]
    smallest = 2.0**-9 if precision == "fp8" else 1.0  # of the positive values
    rows = {
        "zeros": [0.0, -0.0, 0.0],
        "the largest value": [largest, -largest, 1.0, 0.5],
        "just above it": [largest * (1 + 2.0**-20), 1.0, -3.0],
        "half of it": [largest / 2, 1.0, -largest / 2],
        "ties": [largest, *(smallest * half / 2 for half in (1, 3, 5, 7, 9, 11, -1, -3))],
        "below and above ties": [largest, smallest * 0.4999, smallest * 0.5001, smallest * 1.4999, smallest * 1.5001],
        "small weights": [2.0**-100, 2.0**-57, -(2.0**-64), 2.0**-149],
        "large weights": [largest * 2.0**64, -(2.0**64), 1.0],
        "weights": [0.0147 * ((7 * place) % 23 - 11) / 11 for place in range(16)],
    }
    if precision == "fp8":
        rows["ties of normal values"] = [256.0, 17.0, 19.0, 21.0, -17.0, 272.0 / 2, 264.0 / 2, 0.015625 * 1.0625]
    return rows


def _row(name: str, precision: Precision, row: list[float]) -> Case:
    matrix = torch.tensor([row], dtype=torch.float32)
    scales = row_scales(matrix, precision)
    codes = encode(matrix, scales, precision)
    return {
        "name": f"{precision}: {name}",
        "precision": precision,
        "row": [_hex(float(weight)) for weight in matrix[0]],
        "scale": bytes(raw_bytes(scales)).hex(),
        "codes": bytes(raw_bytes(codes)).hex(),
        "values": bytes(raw_bytes(decode(codes, scales, torch.bfloat16))).hex(),
    }


def _values(precision: Precision) -> Case:
    dtype = torch.float8_e4m3fn if precision == "fp8" else torch.int8
    scales = torch.ones(1, dtype=torch.bfloat16)
    texts: list[str | None] = []
    for pattern in range(256):
        codes = torch.tensor([[pattern]], dtype=torch.uint8).view(dtype)
        if pattern in ((0x7F, 0xFF) if precision == "fp8" else (0x80,)):
            texts.append(None)
        else:
            texts.append(bytes(raw_bytes(decode(codes, scales, torch.bfloat16))).hex())
    return {"name": f"{precision}: values of all bit patterns", "precision": precision, "all_values": texts}


def _version(precision: Precision) -> Case:
    matrix = torch.tensor([[0.5, -0.25, 0.125], [3.0, 0.0, -1.0]])
    names = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate.weight", "embed.weight")
    weights = dict.fromkeys(names, matrix)
    published = quantize(weights, precision)
    return {
        "name": f"{precision}: a version",
        "precision": precision,
        "matrix": [[_hex(float(weight)) for weight in row] for row in matrix],
        "weights": sorted(weights),
        "table": [[name, type_name(tensor.dtype), list(tensor.shape)] for name, tensor in sorted(published.items())],
        "digest": digest_weights(published).hex(),
    }


def _hex(weight: float) -> str:
    return struct.pack("<f", weight).hex()
