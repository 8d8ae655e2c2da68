"""Which values change the BF16 view of a weight, and their ranks (docs/spec/pseudogradient.md, sections 4 and 5).

A weight w has a *cell*: the numbers that round to the same BF16 number, to nearest, ties to even. A value v is visible
if w - v lies in another cell. On a grid, the visible values in each direction are those of a least number of steps or
more. They are ranked by their size; of two values of the same size, the one towards the nearer border comes first. So a
visible value has a rank, and each rank is a visible value.
"""

from typing import Any, Final

import numba

from protocol.kernels.jit import kernel
from protocol.pseudogradient.bit_patterns import double_of, float_of

I: Any = numba.int64  # noqa: E741
W: Any = numba.uint32
F: Any = numba.float32
D: Any = numba.float64

MAX_STEPS: Final = 1 << 22
"""Most grid steps of one value."""

MAX_UNITS: Final = 1 << 24
"""Most units of an exact value that has a rank; float32 has all numbers up to this."""

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
def unit_of(bits: Any) -> Any:
    """Return the unit of a weight's exact values, its FP32 unit in the last place, and the reciprocal: float64."""
    exponent = max((I(bits) >> I(23)) & I(0xFF), I(1))
    unit = double_of(numba.uint64(exponent + I(1023 - 150)) << numba.uint64(52))
    return unit, double_of(numba.uint64(I(1023 + 150) - exponent) << numba.uint64(52))


@kernel()
def least_steps(distance: Any, per_step: Any, odd: Any) -> Any:
    """Return how many grid steps leave a cell whose border is at `distance` (float64).

    Args:
        per_step: steps in 1, a power of two, so that the product is exact.
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
def exact_rank(bits: Any, code: Any) -> Any:
    """Return the rank of an exact value (bit pattern `code`); -1 if it has none.

    A value has none if it is no multiple of the weight's unit, has more than MAX_UNITS units, or does no more than to
    change the sign of a weight near 0.
    """
    _, per_unit = unit_of(bits)
    scaled = D(float_of(code & W(0x7FFFFFFF))) * per_unit
    units = I(min(scaled, D(MAX_UNITS)))
    least_out, least_in = borders(bits, per_unit)
    outwards = (code ^ bits) >> W(31) != W(0)
    has_rank = D(units) == scaled and units >= (least_out if outwards else least_in)
    return rank_of(units, outwards, least_out, least_in) if has_rank else I(-1)


@kernel()
def value_at(rank: Any, least_out: Any, least_in: Any) -> Any:
    """Return the visible value of a rank: its size in grid steps, and whether it moves the weight away from zero."""
    near, far = min(least_out, least_in), max(least_out, least_in)
    rest = rank - (far - near)
    second = rest >= I(0) and (rest & I(1)) == I(1)
    steps = near + rank if rest < I(0) else far + (rest >> I(1))
    return steps, (least_out <= least_in) != second
