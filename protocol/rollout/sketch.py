"""Sketches of hidden states: 4 bytes a token that only the right policy's forward pass makes (docs/spec/sketch.md).

Two kinds, both keyed by the window's randomness so that nothing can be prepared before it opens:

- `projection`: four full-width +-1 projections of the RMS-normalized state. Each is close to a standard normal
  variable; 32 units make one standard deviation.
- `topk`: the 32 largest dimensions in magnitude (arXiv 2602.03839, E.3) on a signed logarithmic scale that is 0 at the
  border to the 33rd, four sums with coefficients keyed by *dimension*, scaled likewise. Keying by rank would let a
  constant pass.

Values saturate at +-127. Sketches are compared per position, by the largest of the four differences;
protocol/judging/evidence.py decides.
"""

import math
from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor

from protocol.errors import MalformedError
from protocol.rollout.challenge import stream

SketchKind = Literal["projection", "topk"]
BYTES_PER_TOKEN: Final = 4
TOP_K: Final = 32
_SCALE: Final = 32.0  # units per standard deviation
_LARGEST: Final = 127
_PIECE: Final = 4096  # tokens whose normalized states are held at once


def _normalized(hidden: Tensor) -> Tensor:
    """The states divided by their root mean square: float32 [T, D]."""
    return hidden / hidden.square().mean(dim=-1, keepdim=True).sqrt().clamp_min(1e-12)


def _projection(hidden: Tensor, seed: bytes) -> Tensor:
    D = hidden.shape[-1]
    bits = np.unpackbits(np.frombuffer(stream(seed, "projection", -(-4 * D // 8)), dtype=np.uint8))[: 4 * D]
    signs = torch.from_numpy(bits.astype(np.float32) * 2.0 - 1.0).reshape(D, 4).to(hidden.device)
    projected: Tensor = _normalized(hidden) @ signs
    return projected * (_SCALE / math.sqrt(D))


def _top_k(hidden: Tensor, seed: bytes) -> Tensor:
    D = hidden.shape[-1]
    k = min(TOP_K, D)
    raw = np.frombuffer(stream(seed, "topk", 4 * D), dtype=np.int8).astype(np.float32)
    coefficients = torch.from_numpy(raw / 74.0).reshape(D, 4).to(hidden.device)  # 74: standard deviation of an int8
    magnitudes = _normalized(hidden).abs().clamp_min(1e-12)
    values, dimensions = torch.topk(magnitudes, k, dim=-1)
    # Octaves above the first dimension left out: one that slips over the border takes next to nothing with it.
    border = torch.topk(magnitudes, min(k + 1, D), dim=-1).values[..., -1:]
    signed = torch.log2(values / border) * torch.gather(hidden, -1, dimensions).sign()
    sums: Tensor = torch.einsum("tk,tkj->tj", signed, coefficients[dimensions])
    return sums * (_SCALE / signed.square().sum(dim=-1, keepdim=True).sqrt().clamp_min(1e-12))


def commit(kind: SketchKind, hidden: Tensor, seed: bytes) -> bytes:
    """The sketch of a completion.

    Args:
        hidden: float32 [T, D], the final hidden state from which each token was drawn.
        seed: the window's 32-byte sketch seed.

    Returns:
        4 * T bytes: int8 [T, 4], row-major.
    """
    return b"".join(_committed(kind, piece, seed) for piece in torch.split(hidden, _PIECE))


def _committed(kind: SketchKind, hidden: Tensor, seed: bytes) -> bytes:
    hidden = hidden.to(torch.float32)
    values = _projection(hidden, seed) if kind == "projection" else _top_k(hidden, seed)
    # What is no number becomes 0: converting NaN to an integer gives what the processor likes.
    saturated = (
        values.nan_to_num(0.0, posinf=_LARGEST, neginf=-_LARGEST).round().clamp(-_LARGEST, _LARGEST).to(torch.int8)
    )
    return saturated.cpu().contiguous().numpy().tobytes()


def distances(claimed: bytes, recomputed: bytes) -> np.ndarray:
    """The largest of the four absolute differences at each position of two sketches of equally many tokens.

    Returns:
        int16 [T], in sketch units.

    Raises:
        MalformedError: the claimed sketch has another length.
    """
    if len(claimed) != len(recomputed):
        raise MalformedError(f"a sketch of {len(claimed)} bytes where {len(recomputed)} are due")
    a = np.frombuffer(claimed, dtype=np.int8).astype(np.int16).reshape(-1, BYTES_PER_TOKEN)
    b = np.frombuffer(recomputed, dtype=np.int8).astype(np.int16).reshape(-1, BYTES_PER_TOKEN)
    worst: np.ndarray = np.abs(a - b).max(axis=1)
    return worst
