"""Sketches of hidden states: 4 bytes for each token, which only the right policy's forward pass gives
(docs/spec/sketch.md).

There are two kinds. Both are keyed by the window's randomness, so that nothing can be computed before the window opens:

- `projection`: four full-width +-1 projections of the RMS-normalized state. Each is close to a standard normal
  variable; 512 units are one standard deviation.
- `topk`: the 32 largest dimensions in magnitude (arXiv 2602.03839, E.3) on a signed logarithmic scale that is 0 at the
  magnitude of the 33rd; four sums with coefficients keyed by *dimension*, scaled likewise. With coefficients keyed by
  rank, a constant would pass.

Values are whole units modulo 256: a forger has to know a state to one part in a thousand, and not only roughly.
Sketches are compared by the largest of the four differences at each position, on the circle of 256 units;
protocol/judging/evidence.py counts them.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor

from protocol.errors import MalformedError
from protocol.rollout.challenge import stream

SketchKind = Literal["projection", "topk"]
BYTES_PER_TOKEN: Final = 4
SEED_BYTES: Final = 32
TOP_K: Final = 32
_SCALE: Final = 512.0  # units per standard deviation
_PIECE: Final = 4096  # tokens whose normalized states are in memory at once


@dataclass(frozen=True)
class SketchKey:
    """What determines the sketches of a window: their kind, and the window's 32-byte seed."""

    kind: SketchKind
    seed: bytes


def _normalized(hidden: Tensor) -> Tensor:
    """Return the states divided by their root mean square: float32 [T, D]."""
    return hidden / _square_means(hidden).sqrt().clamp_min(1e-12)


def _square_means(hidden: Tensor) -> Tensor:
    """Return the mean square of each row: float32 [T, 1]. On a CPU, all machines compute the same bits."""
    if hidden.device.type != "cpu":
        return hidden.square().mean(dim=-1, keepdim=True)
    from protocol.kernels import exact  # noqa: PLC0415 - numba costs processes that compute no sketch half a second

    return torch.from_numpy(exact.square_sums(exact.padded(hidden)))[:, None] / hidden.shape[-1]


def _product(states: Tensor, matrix: Tensor) -> Tensor:
    """Return states @ matrix: float32 [T, J] from [T, D] and [D, J]. On a CPU, all machines compute the same bits."""
    if states.device.type != "cpu":
        return states @ matrix
    from protocol.kernels import exact  # noqa: PLC0415 - see _square_means

    return torch.from_numpy(exact.products(exact.padded(states), exact.padded(matrix.t())))


@lru_cache(maxsize=8)
def _coefficients(kind: SketchKind, seed: bytes, width: int, device: torch.device) -> Tensor:
    """Return the coefficients of the dimensions: float32 [D, 4]; kept, because an engine needs them in each step."""
    if kind == "topk":
        raw = np.frombuffer(stream(seed, "topk", 4 * width), dtype=np.int8).astype(np.float32)
        return torch.from_numpy(raw / 74.0).reshape(width, 4).to(device)  # 74: standard deviation of an int8
    bits = np.unpackbits(np.frombuffer(stream(seed, "projection", -(-4 * width // 8)), dtype=np.uint8))[: 4 * width]
    return torch.from_numpy(bits.astype(np.float32) * 2.0 - 1.0).reshape(width, 4).to(device)


def _projection(hidden: Tensor, signs: Tensor) -> Tensor:
    return _product(_normalized(hidden), signs) * (_SCALE / math.sqrt(hidden.shape[-1]))


def _top_k(hidden: Tensor, coefficients: Tensor) -> Tensor:
    D = hidden.shape[-1]
    k = min(TOP_K, D)
    magnitudes = _normalized(hidden).abs().clamp_min(1e-12)
    values, dimensions = torch.topk(magnitudes, k, dim=-1)
    # Octaves above the largest excluded dimension, so that a dimension at the border contributes next to nothing.
    border = torch.topk(magnitudes, min(k + 1, D), dim=-1).values[..., -1:]
    octaves = torch.log2(values / border) * torch.gather(hidden, -1, dimensions).sign()
    sums: Tensor = torch.einsum("tk,tkj->tj", octaves, coefficients[dimensions])
    return sums * (_SCALE / octaves.square().sum(dim=-1, keepdim=True).sqrt().clamp_min(1e-12))


def values_of(kind: SketchKind, hidden: Tensor, seed: bytes) -> Tensor:
    """Return the values of a sketch before they are rounded: float32 [T, 4] on the states' device (see `commit`)."""
    compute = _projection if kind == "projection" else _top_k
    coefficients = _coefficients(kind, seed, hidden.shape[-1], hidden.device)
    return torch.cat([compute(piece.to(torch.float32), coefficients) for piece in torch.split(hidden, _PIECE)])


def units_of(values: Tensor) -> Tensor:
    """Return values of a sketch as whole units modulo 256: uint8 [T, 4] on their device."""
    # NaN becomes 0: its conversion to an integer would depend on the processor.
    return (values.nan_to_num(0.0, posinf=0.0, neginf=0.0).round().to(torch.int64) & 0xFF).to(torch.uint8)


def rounded(values: Tensor) -> bytes:
    """Return the sketch of some values: uint8 [T, 4], row-major."""
    return units_of(values).cpu().numpy().tobytes()


def commit(kind: SketchKind, hidden: Tensor, seed: bytes) -> bytes:
    """Compute the sketch of a completion, uint8 [T, 4], row-major, from the final hidden states float32 [T, D] from
    which its tokens were sampled, and the window's 32-byte sketch seed.
    """
    return rounded(values_of(kind, hidden, seed))


def distances(sketch: bytes, recomputed: bytes) -> np.ndarray:
    """Compute the largest of the four differences on the circle at each position of the miner's and the validator's
    sketch of T positions, 4 * T bytes: uint8 [T], in sketch units, at most 128. MalformedError if the miner's has
    another length.
    """
    if len(sketch) != len(recomputed):
        raise MalformedError(f"a sketch of {len(sketch)} bytes where {len(recomputed)} are required")
    a, b = np.frombuffer(sketch, dtype=np.uint8), np.frombuffer(recomputed, dtype=np.uint8)
    worst: np.ndarray = np.minimum(a - b, b - a).reshape(-1, BYTES_PER_TOKEN).max(axis=1)
    return worst
