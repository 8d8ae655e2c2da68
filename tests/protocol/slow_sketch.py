"""A second implementation of docs/spec/sketch.md in float64, one position at a time: slow and simple."""

import numpy as np
from numpy.typing import NDArray

from protocol.rollout.challenge import stream

Array = NDArray[np.float64]


def values(kind: str, hidden: Array, seed: bytes) -> Array:
    """Compute the unrounded values of a sketch, not yet modulo 256: float64 [T, 4] from `hidden`, float64 [T, D]."""
    return np.array([_projection(row, seed) if kind == "projection" else _top_k(row, seed) for row in hidden])


def _normalized(row: Array) -> Array:
    normalized: Array = row / max(np.sqrt((row**2).mean()), 1e-12)
    return normalized


def _projection(row: Array, seed: bytes) -> list[float]:
    D = len(row)
    packed_bits = stream(seed, "projection", -(-4 * D // 8))
    bits = [(byte >> (7 - place)) & 1 for byte in packed_bits for place in range(8)]
    x = _normalized(row)
    return [sum(float(x[d]) * (2 * bits[4 * d + j] - 1) for d in range(D)) * 512 / float(np.sqrt(D)) for j in range(4)]


def _top_k(row: Array, seed: bytes) -> list[float]:
    raw = [byte - 256 if byte > 127 else byte for byte in stream(seed, "topk", 4 * len(row))]
    x = np.abs(_normalized(row))
    order = sorted(range(len(row)), key=lambda d: -x[d])
    border = max(float(x[order[min(32, len(row) - 1)]]), 1e-12)
    g = {d: float(np.log2(max(x[d], 1e-12) / border)) * float(np.sign(row[d])) for d in order[:32]}
    norm = max(float(np.sqrt(sum(value**2 for value in g.values()))), 1e-12)
    return [sum(value * raw[4 * d + j] / 74 for d, value in g.items()) * 512 / norm for j in range(4)]
