"""Which values change the BF16 view of a weight, and their ranks (docs/spec/pseudogradient.md, sections 4 and 5).

A weight w has a *cell*: the numbers that round to the same BF16 number, to nearest, ties to even. A value v is visible
if w - v lies in another cell. On a grid, the visible values in each direction are those of a least number of steps or
more. They are ranked by their size; of two values of the same size, the one towards the nearer border comes first. So a
visible value has a rank, and each rank is a visible value.
"""

from typing import Any, Final

import numba

from protocol.kernels.jit import kernel
from protocol.pseudogradient.bit_patterns import float_of

I: Any = numba.int64  # noqa: E741
W: Any = numba.uint32
F: Any = numba.float32
D: Any = numba.float64

MAX_STEPS: Final = 1 << 22
"""Most grid steps of one value."""

ROUNDER: Final = 1.5 * 2.0**23
"""A float32 of at most MAX_STEPS plus this, minus this, is rounded to the nearest integer, ties to even."""


@kernel()
def view_of(bits: Any) -> Any:
    """Return the BF16 bit pattern of a finite float32 bit pattern (uint32), rounded to nearest, ties to even."""
    return (bits + W(0x7FFF) + ((bits >> W(16)) & W(1))) >> W(16)


@kernel()
def grid_step(bits: Any, floor: Any, fraction: Any) -> Any:
    """Return the grid step of a weight, and its reciprocal: float32.

    The step is a BF16 unit in the last place of the weight, divided by 2^fraction.

    Args:
        bits: bit pattern of the weight: uint32.
        floor: the least exponent field by which a grid is made, from MIN_FLOOR + `fraction` on: uint32.
    """
    exponent = max((bits >> W(23)) & W(0xFF), floor)
    step = float_of((exponent - W(7) - fraction) << W(23))
    return step, float_of((W(261) + fraction - exponent) << W(23))


@kernel()
def least_steps(distance: Any, per_step: Any, odd: Any) -> Any:
    """Return how many grid steps leave a cell whose border is at `distance` (float64).

    Args:
        per_step: steps per unit, a power of two, so that the product is exact.
        odd: whether the view's bit pattern is odd; then the border itself belongs to the other cell.
    """
    exact = distance * D(per_step)
    whole = I(exact)
    return whole + I(1) - I(D(whole) == exact and odd)


@kernel()
def borders(bits: Any, per_step: Any) -> Any:
    """Return the least steps that leave a weight's cell away from zero, and those that leave it towards zero."""
    magnitude = bits & W(0x7FFFFFFF)
    view = view_of(magnitude)
    own, middle, odd = D(float_of(magnitude)), view << W(16), (view & W(1)) == W(1)
    above = D(float_of(middle + W(0x8000))) - own
    inner = float_of(W(0x80008000)) if view == W(0) else float_of(middle - W(0x8000))
    return least_steps(above, per_step, odd), least_steps(own - D(inner), per_step, odd)


@kernel()
def rank_of(steps: Any, outwards: Any, least_out: Any, least_in: Any) -> Any:
    """Return the rank of a visible value, from 0 on.

    Args:
        steps: its size in grid steps.
        outwards: whether it moves the weight away from zero.
        least_out, least_in: see `borders`.
    """
    near, far = min(least_out, least_in), max(least_out, least_in)
    second = outwards != (least_out <= least_in)
    return steps - near if steps < far else (far - near) + I(2) * (steps - far) + I(second)


@kernel()
def value_at(rank: Any, least_out: Any, least_in: Any) -> Any:
    """Return the visible value of a rank: its size in grid steps, and whether it moves the weight away from zero."""
    near, far = min(least_out, least_in), max(least_out, least_in)
    rest = rank - (far - near)
    second = rest >= I(0) and (rest & I(1)) == I(1)
    steps = near + rank if rest < I(0) else far + (rest >> I(1))
    return steps, (least_out <= least_in) != second
