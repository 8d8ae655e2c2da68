"""The encoder's first pass: which entries are sent, and what remains (docs/spec/pseudogradient.md, sections 3 to 5)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np

from protocol.kernels.jit import kernel
from protocol.pseudogradient.bit_patterns import bits_of_float
from protocol.pseudogradient.visibility import MAX_STEPS, ROUNDER, F, W, grid_step, view_of

BLOCK_ELEMENTS: Final = 1 << 15
"""Elements that the gate and the scan take at a time, so that what lies between them stays in the cache."""


def gate_exact(
    base: Any, local: Any, feedback: Any, decay: Any, codes: Any, residual: Any, tops: Any, marks: Any
) -> Any:
    """Choose the entries that are sent as exact values.

    Args:
        base, local, feedback: float32 [n].
        codes: result: the bit pattern of each entry, sent or not: uint32 [n].
        residual: result: the error feedback after sending: float32 [n].
        tops: result: the upper halves of the weights' bit patterns: uint16 [n].
        marks: result: the same, with the lowest bit inverted where the entry is sent.
    """
    for i in range(base.size):
        weight = base[i]
        update = decay * feedback[i] + (weight - local[i])
        bits = bits_of_float(weight)
        visible = view_of(bits_of_float(weight - update)) != view_of(bits)
        codes[i] = bits_of_float(update)
        residual[i] = F(0) if visible else update
        tops[i] = bits >> W(16)
        marks[i] = (bits >> W(16)) ^ W(visible)
    return 0


def gate_grid(
    base: Any,
    local: Any,
    feedback: Any,
    decay: Any,
    floor: Any,
    fraction: Any,
    codes: Any,
    residual: Any,
    tops: Any,
    marks: Any,
) -> Any:
    """Choose the entries that are sent as values on the grid; see `gate_exact` and `grid_step`.

    A value is not sent if float32 cannot hold what would remain: then an update is 2^46 times the others.

    Args:
        codes: result: the number of steps of each entry (two's complement), sent or not: uint32 [n].
    """
    for i in range(base.size):
        weight = base[i]
        update = decay * feedback[i] + (weight - local[i])
        bits = bits_of_float(weight)
        step, per_step = grid_step(bits, floor, fraction)
        scaled = min(max(update * per_step, F(-MAX_STEPS)), F(MAX_STEPS))
        steps = (scaled + F(ROUNDER)) - F(ROUNDER)
        value = steps * step
        rest = update - value
        visible = view_of(bits_of_float(weight - value)) != view_of(bits) and update - rest == value
        codes[i] = bits_of_float(steps + F(ROUNDER))
        residual[i] = rest if visible else update
        tops[i] = bits >> W(16)
        marks[i] = (bits >> W(16)) ^ W(visible)
    return 0


@dataclass(frozen=True, slots=True)
class Gates:
    """The gates' kernels."""

    exact: Callable[..., int]
    grid: Callable[..., int]


@cache
def gates() -> Gates:
    """Compile the kernels, or load them from numba's cache."""
    floats, words, halves = "float32[::1]", "uint32[::1]", "uint16[::1]"
    inputs, results = (floats, floats, floats, "float32"), (words, floats, halves, halves)
    return Gates(
        exact=kernel(*inputs, *results)(gate_exact),
        grid=kernel(*inputs, "uint32", "uint32", *results)(gate_grid),
    )


assert int(np.float32(ROUNDER).view(np.uint32)) == 0x4B400000
