"""Runs with quantized weights: 8-bit codes with a scale for each row (docs/spec/quantized.md).

Scales are powers of two, so that each weight, the value of its code times the scale of its row, is a BF16 number. The
codes and scales of a version are a function of the trainer's float32 weights alone.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from protocol.digest import Weights, type_name
from protocol.errors import ChainError, MalformedError

Precision = Literal["bf16", "fp8", "int8"]
"""What the matrices of a run's versions consist of."""

SCALE: Final = "_scale"
"""What follows a matrix's name in the name of its scales."""

_BF16: Final = "BF16"
_LARGEST_EXPONENT: Final = 64  # of a scale; the smallest is its negative
_BIAS: Final = 127  # of the exponents of BF16 and float32
_BF16_SHIFT: Final = 7  # bits of the fraction
_F32_SHIFT: Final = 23
_MINUS_ZERO: Final = 0x80
_PIECE_ELEMENTS: Final = 1 << 20  # that are computed at a time, so that no copy is as large as the largest matrix

_in_layer = re.compile(r"(?:^|\.)(?:layers|h)\.[0-9]+\.")
_ROUTER: Final = ".gate.weight"


@dataclass(frozen=True)
class _Codes:
    """The 8-bit codes of a precision, of which the largest is fraction * 2^exponent; no codes have the value NaN."""

    dtype: torch.dtype
    fraction: float
    exponent: int
    values: Tensor


def _values_of(dtype: torch.dtype) -> Tensor:
    values = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)
    return values.masked_fill_(values == -128, float("nan")) if dtype == torch.int8 else values


_codes: Final[dict[str, _Codes]] = {
    "fp8": _Codes(torch.float8_e4m3fn, 448 / 2**9, 9, _values_of(torch.float8_e4m3fn)),
    "int8": _Codes(torch.int8, 127 / 2**7, 7, _values_of(torch.int8)),
}
_values: Final = {codes.dtype: codes.values for codes in _codes.values()}


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether a quantized run has codes for a tensor: for a matrix in a layer that is no router of experts."""
    return len(shape) == 2 and _in_layer.search(name) is not None and not name.endswith(_ROUTER)


def published_outline(
    precision: Precision, shapes: Mapping[str, Sequence[int]]
) -> dict[str, tuple[str, Sequence[int]]]:
    """Return the dtype and the shape of each tensor of a version, by name, from the shapes of the model's weights."""
    outline: dict[str, tuple[str, Sequence[int]]] = {}
    for name, shape in shapes.items():
        outline[name] = _BF16, shape
        if precision != "bf16" and is_matrix(name, shape):
            outline[name] = type_name(_codes[precision].dtype), shape
            outline[name + SCALE] = _BF16, shape[:1]
    return outline


def row_scales(matrix: Tensor, precision: Precision) -> Tensor:
    """Return the scales of a matrix, float32 or BF16 [rows, columns] on any device: BF16 [rows]. ValueError if a weight
    is not finite, or is too large.
    """
    largest = torch.cat([piece.abs().amax(dim=1).to(torch.float32) for piece in _pieces(matrix)])
    if not torch.isfinite(largest).all():
        raise ValueError("a weight that is not finite")
    codes = _codes[precision]
    fractions, exponents = torch.frexp(largest)
    exponents = exponents - codes.exponent + (fractions > codes.fraction).to(exponents.dtype)
    if (exponents > _LARGEST_EXPONENT).any():
        raise ValueError(f"a weight of {float(largest.max()):g}, which no scale can represent")
    exponents = exponents.masked_fill(largest == 0, -_LARGEST_EXPONENT).clamp_(min=-_LARGEST_EXPONENT)
    return ((exponents + _BIAS) << _BF16_SHIFT).to(torch.int16).view(torch.bfloat16)


def encode(matrix: Tensor, scales: Tensor, precision: Precision) -> Tensor:
    """Return the codes [rows, columns] of a float32 or BF16 matrix with its scales BF16 [rows], in the precision's
    dtype.
    """
    result = torch.empty(matrix.shape, dtype=_codes[precision].dtype, device=matrix.device)
    inverses = (((2 * _BIAS) << _F32_SHIFT) - scales.to(torch.float32).view(torch.int32)).view(torch.float32)[:, None]
    for piece, inverse, part in zip(_pieces(matrix), _pieces(inverses, matrix), _pieces(result), strict=True):
        scaled = piece.to(torch.float32) * inverse
        if precision == "int8":
            part.copy_(scaled.round_())
        else:
            bits = scaled.to(part.dtype).view(torch.uint8)
            part.view(torch.uint8).copy_(bits.masked_fill_(bits == _MINUS_ZERO, 0))
    return result


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights of codes [rows, columns] with scales BF16 [rows]: exact in BF16 and in float32. MalformedError
    for a bit pattern that is no code.
    """
    result = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    table = _values[codes.dtype].to(codes.device)
    factors = scales.to(torch.float32)[:, None]
    for piece, factor, part in zip(_pieces(codes), _pieces(factors, codes), _pieces(result), strict=True):
        indices = piece.contiguous().view(torch.uint8).to(torch.int32).view(-1)
        values = torch.index_select(table, 0, indices).view(piece.shape)
        if torch.isnan(values.sum()):  # all codes have finite values
            raise MalformedError("a bit pattern that is no code")
        part.copy_(values * factor)
    return result


def round_matrix(matrix: Tensor, precision: Precision, dtype: torch.dtype) -> Tensor:
    """Return the weights [rows, columns] that a version has for these."""
    scales = row_scales(matrix, precision)
    return decode(encode(matrix, scales, precision), scales, dtype)


def quantize(weights: Weights, precision: Precision) -> dict[str, Tensor]:
    """Return the tensors of a version with these float32 or BF16 weights, contiguous; `bf16` only rounds them."""
    published: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if precision == "bf16" or not is_matrix(name, tensor.shape):
            published[name] = tensor.to(torch.bfloat16).contiguous()
            continue
        scales = row_scales(tensor, precision)
        published |= {name: encode(tensor, scales, precision), name + SCALE: scales}
    return published


def published_tensors(weights: Weights, precision: Precision, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the named tensors of a version, contiguous, on the CPU, of float32 or BF16 weights on any device."""
    sources = {name if name in weights else name.removesuffix(SCALE) for name in names}
    published = quantize({name: weights[name] for name in sources}, precision)
    return {name: published[name].cpu() for name in names}


def is_code(tensor: Tensor) -> bool:
    """Return whether a tensor of a version has codes."""
    return tensor.dtype in _values


def dequantize(
    published: Weights,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | None = None,
    places: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return the weights of a version, by the names of the model. Tensors that have dtype and device (None: any) are
    not copied. MalformedError if codes are not a matrix with scales, or a bit pattern is no code. Weights for which
    `places` has tensors are written into these; the others are added to it, and it is returned.
    """
    weights = {} if places is None else places
    for name, tensor in published.items():
        if not is_code(tensor):
            if not is_scale(name, published):
                weights[name] = weights[name].copy_(tensor) if name in weights else tensor.to(device, dtype)
            continue
        scales = published.get(name + SCALE)
        if tensor.ndim != 2 or scales is None or scales.shape != tensor.shape[:1]:
            raise MalformedError("codes without a scale for each row", name)
        try:
            matrix = decode(tensor.to(device), scales.to(device), dtype)
        except MalformedError as error:
            raise MalformedError(error.what, name) from None
        weights[name] = weights[name].copy_(matrix) if name in weights else matrix
    return weights


def is_scale(name: str, names: Weights) -> bool:
    """Return whether a tensor has the scales of another one of the same version."""
    matrix = names.get(name.removesuffix(SCALE)) if name.endswith(SCALE) else None
    return matrix is not None and is_code(matrix)


def check_table(precision: Precision, tensors: Collection[tuple[str, str, tuple[int, ...]]], place: str) -> None:
    """Check, before any tensor is fetched, that a version's table of (name, dtype, shape) is that of a run: ChainError
    for a dtype that does not fit name and shape, or codes and scales that do not match.
    """
    if precision == "bf16":
        return
    table = {name: (dtype, shape) for name, dtype, shape in tensors}
    scales = {name + SCALE for name, (_, shape) in table.items() if is_matrix(name, shape)}
    expected = published_outline(precision, {name: shape for name, (_, shape) in table.items() if name not in scales})
    for name in sorted(table.keys() | expected.keys()):
        dtype, shape = expected.get(name, ("", ()))
        if table.get(name) != (dtype, tuple(shape)):
            raise ChainError(f"not the table of a version in {precision}", f"{place}, {name}")


def check_scales(published: Weights, place: str) -> None:
    """Raise ChainError for scales of a version that are not powers of two from 2^-64 to 2^64 in BF16."""
    for name, tensor in published.items():
        if is_scale(name, published):
            if tensor.dtype != torch.bfloat16:  # possible in a run of `bf16`, whose tables may have any dtypes
                raise ChainError("scales that are not BF16", f"{place}, {name}")
            bits = tensor.view(torch.int16).to(torch.int32)
            exponents = (bits >> _BF16_SHIFT) - _BIAS
            whole = (exponents + _BIAS) << _BF16_SHIFT == bits
            if not (whole & (exponents.abs() <= _LARGEST_EXPONENT)).all():
                raise ChainError("a scale that is no power of two from 2^-64 to 2^64", f"{place}, {name}")


def _pieces(tensor: Tensor, like: Tensor | None = None) -> Iterator[Tensor]:
    """Yield the rows of a tensor, some at a time: as many as of `like`, if that is given."""
    rows = max(1, _PIECE_ELEMENTS // max(1, (tensor if like is None else like).shape[1]))
    yield from tensor.split(rows)  # type: ignore[no-untyped-call]
