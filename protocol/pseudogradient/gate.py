"""The encoder's first pass: which entries are sent, and what remains (docs/spec/pseudogradient.md, sections 3 to 5)."""

from typing import Any

import numpy as np

from protocol.kernels.jit import kernel
from protocol.pseudogradient.arithmetic import INFINITE
from protocol.pseudogradient.bit_patterns import bits_of_float
from protocol.pseudogradient.visibility import MAX_STEPS, ROUNDER, F, W, grid_step, view_of


@kernel()
def gate_exact(base: Any, local: Any, feedback: Any, decay: Any, values: Any, residual: Any, flags: Any) -> Any:
    """Choose the entries that are sent as exact values; return how many updates are not finite.

    Args:
        base, local, feedback: float32 [n].
        values: result: what is sent, zeros elsewhere: float32 [n].
        residual: result: the error feedback after sending: float32 [n].
        flags: result: 1 where the entry is sent: uint8 [n].
    """
    infinite = W(0)
    for i in range(base.size):
        weight = base[i]
        update = decay * feedback[i] + (weight - local[i])
        visible = view_of(bits_of_float(weight - update)) != view_of(bits_of_float(weight))
        values[i] = update if visible else F(0)
        residual[i] = F(0) if visible else update
        flags[i] = visible
        infinite += W(W(bits_of_float(update) & W(INFINITE)) == W(INFINITE))
    return infinite


@kernel()
def gate_grid(
    base: Any,
    local: Any,
    feedback: Any,
    decay: Any,
    floor: Any,
    fraction: Any,
    values: Any,
    residual: Any,
    flags: Any,
) -> Any:
    """Choose the entries that are sent as values on the grid; see `gate_exact` and `grid_step`.

    A value is not sent if float32 cannot hold what would remain: then an update is 2^46 times the others.
    """
    infinite = W(0)
    for i in range(base.size):
        weight = base[i]
        update = decay * feedback[i] + (weight - local[i])
        bits = bits_of_float(weight)
        step, per_step = grid_step(bits, floor, fraction)
        scaled = min(max(update * per_step, F(-MAX_STEPS)), F(MAX_STEPS))
        value = ((scaled + F(ROUNDER)) - F(ROUNDER)) * step
        rest = update - value
        visible = (view_of(bits_of_float(weight - value)) != view_of(bits)) & (update - rest == value)
        values[i] = value if visible else F(0)
        residual[i] = rest if visible else update
        flags[i] = visible
        infinite += W(W(bits_of_float(update) & W(INFINITE)) == W(INFINITE))
    return infinite


assert int(np.float32(ROUNDER).view(np.uint32)) == 0x4B400000
