"""Two published rules for hidden states, for comparisons on the same states as this project's sketch.

`BucketSketch` is grail's deployed sketch. The 16 largest dimensions in order of their number, the sign and floor(0.8
log2(|h| + 1)) of each, at most 7; the dot product with 16 coefficients in [-127, 127], which belong to ranks; modulo
2^31 - 1; agreement within 6,000 (plus 5 times the root of the position).

`Toploc` (arXiv 2501.16007) takes the 128 largest activations in BF16 of each 32 tokens. Its proof is the polynomial
over GF(65497) through their (index, bits): 2 bytes a coefficient and 2 of modulus. The verifier evaluates it at its own
128 indices; more than 38 wrong exponents, or mantissas of the others off by more than 10 on average or 8 in the median,
are refused. A wrong sign counts as a wrong exponent, which is the stricter reading.
"""

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

_Q: Final = 2**31 - 1
_P: Final = 65497


class BucketSketch:
    """grail's sketch and its tolerance."""

    top: Final = 16
    buckets: Final = 8
    tolerance: Final = 6000
    growth: Final = 5.0

    def commit(self, hidden: Tensor, seed: int) -> np.ndarray:
        """Return the sketch int64 [T] of hidden states float32 [T, D]."""
        coefficients = torch.from_numpy(np.random.default_rng(seed).integers(-127, 128, self.top)).double()
        dimensions = hidden.abs().topk(self.top, dim=-1).indices.sort(dim=-1).values
        values = hidden.gather(-1, dimensions).double()
        levels = (torch.log2(values.abs() + 1.0) * (self.buckets / 10.0)).floor().clamp_max(self.buckets - 1)
        sums: np.ndarray = ((levels * values.sign()) @ coefficients).long().numpy() % _Q
        return sums

    def within(self, claimed_values: np.ndarray, reference_values: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return which positions agree: bool [T]."""
        distances = np.abs(claimed_values - reference_values)
        agreement: np.ndarray = np.minimum(distances, _Q - distances) <= self.tolerance + self.growth * np.sqrt(
            positions
        )
        return agreement


@dataclass(frozen=True)
class Errors:
    """The number of wrong exponents among 128 values, and the errors of the other mantissas."""

    exponents: int
    mean: float
    median: float

    @property
    def accepted(self) -> bool:
        """Whether the errors are within the published thresholds."""
        return self.exponents <= 38 and self.mean <= 10.0 and self.median <= 8.0


class Toploc:
    """TOPLOC's proof of 32 tokens, 258 bytes."""

    tokens: Final = 32
    top: Final = 128

    def prove(self, hidden: Tensor) -> bytes:
        """Return the proof of hidden states float32 [32, D]."""
        indices, bits = self._largest(hidden)
        return self.through(indices, bits)

    def through(self, indices: np.ndarray, bits: np.ndarray) -> bytes:
        """Return the proof whose polynomial goes through these points, int64 [128] each."""
        coefficients = _interpolate(indices % _P, bits % _P)
        return _P.to_bytes(2, "big") + coefficients.astype(">u2").tobytes()

    def check(self, proof: bytes, hidden: Tensor) -> Errors:
        """Compare a proof with hidden states float32 [32, D]."""
        indices, reference_values = self._largest(hidden)
        modulus = int.from_bytes(proof[:2], "big") or 1
        claimed_bits = _evaluate(np.frombuffer(proof[2:], ">u2").astype(np.int64), indices % modulus)
        same_exponents = (claimed_bits >> 7) == (reference_values >> 7)
        distances = np.abs((claimed_bits & 0x7F) - (reference_values & 0x7F))[same_exponents]
        if not len(distances):
            return Errors(self.top, np.inf, np.inf)
        return Errors(int((~same_exponents).sum()), float(distances.mean()), float(np.median(distances)))

    def _largest(self, hidden: Tensor) -> tuple[np.ndarray, np.ndarray]:
        activations = hidden.to(torch.bfloat16).reshape(-1)
        indices = activations.float().abs().topk(self.top).indices
        bits = activations[indices].view(torch.int16).numpy().astype(np.int64) & 0xFFFF
        return indices.numpy(), bits


@cache
def _inverses() -> np.ndarray:
    """Return 1 / x modulo P for every x: int64 [P]."""
    table = [0, 1]
    for x in range(2, _P):
        table.append(-(_P // x) * table[_P % x] % _P)
    return np.array(table, dtype=np.int64)


def _interpolate(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the coefficients of the polynomial modulo P through (x, y), the constant one first: int64 [n]."""
    differences, inverses = y.astype(np.int64) % _P, _inverses()
    for order in range(1, len(x)):
        gaps = inverses[(x[order:] - x[:-order]) % _P]
        differences[order:] = (differences[order:] - differences[order - 1 : -1]) * gaps % _P
    coefficients = np.zeros(len(x), dtype=np.int64)
    for place in range(len(x) - 1, -1, -1):  # Horner's method in Newton's basis
        product = np.roll(coefficients, 1)
        product[0] = 0
        coefficients = (product - coefficients * x[place]) % _P
        coefficients[0] = (coefficients[0] + differences[place]) % _P
    return coefficients


def _evaluate(coefficients: np.ndarray, x: np.ndarray) -> np.ndarray:
    value = np.zeros_like(x)
    for coefficient in coefficients[::-1]:
        value = (value * x + coefficient) % _P
    return value
