"""Which values change the BF16 view of a weight, and their ranks (docs/spec/pseudogradient.md, sections 4 and 5).

A weight w has a *cell*: the numbers that round to the same BF16 number, to nearest, ties to even. A value v is visible
if w - v lies in another cell. The visible multiples of a step in each direction are those of a least number of steps or
more. They are ranked by their size; of two values of the same size, the one towards the nearer border comes first. So a
visible multiple has a rank, and each rank is a visible multiple.

Everything is computed with integers: a weight of the exponent field E and the borders of its cell are multiples of its
*unit*, 2^(max(E, 1) - 150), or of half of it. The functions have no branches and 32-bit results, so that a loop over
many weights is compiled to SIMD.
"""

from typing import Any, Final

import numba

from protocol.kernels.jit import inlined
from protocol.kernels.simd import bits_of_float, float_of

S: Any = numba.int32
W: Any = numba.uint32
F: Any = numba.float32

MAX_STEPS: Final = 1 << 22
"""Most grid steps of one value."""

MAX_UNITS: Final = 1 << 24
"""Most units of an exact value that has a rank; float32 has all numbers up to this."""

MAX_RANK: Final = 1 << 28
"""More than the rank of any value; a decoder replaces larger numbers by this."""

ROUNDER: Final = 1.5 * 2.0**23
"""A float32 of at most MAX_STEPS plus this, minus this, is rounded to the nearest integer, ties to even."""

UNSIGNED: Final = 0x7FFFFFFF


@inlined
def view_of(bits: Any) -> Any:
    """Return the BF16 bit pattern of a finite float32 bit pattern (uint32), rounded to nearest, ties to even."""
    # A lower half above 0x8000 carries into the upper one; 0x8000 itself does so if the upper one is odd.
    return W(W(bits + W(0x7FFF)) + W(W(bits >> W(16)) & W(1))) >> W(16)


@inlined
def exponent_of(bits: Any) -> Any:
    """Return the exponent by which a bit pattern (uint32) has its unit: int32, at least 1."""
    # Subnormal numbers, of the exponent field 0, are as far apart as the smallest normal ones.
    return max(S(W(bits >> W(23)) & W(0xFF)), S(1))


@inlined
def grid_step(bits: Any, floor: Any, fraction: Any) -> Any:
    """Return the grid step of a weight, from its bit pattern, and its reciprocal: float32. It is a BF16 unit in the
    last place of the weight, divided by 2^fraction. The floor is the least exponent field by which a grid is made, from
    MIN_FLOOR + `fraction` on: uint32.
    """
    # Both are powers of two, which have an exponent field only. A BF16 number has 7 bits behind its leading one, and
    # the floor keeps the step's exponent field above 0.
    exponent = max(W(W(bits >> W(23)) & W(0xFF)), floor)
    step = float_of(W(W(exponent - W(7)) - fraction) << W(23))
    return step, float_of(W(W(W(261) + fraction) - exponent) << W(23))


@inlined
def grid_shift(bits: Any, floor: Any, fraction: Any) -> Any:
    """Return log2 of the units of a weight in its grid step: int32, at most 31, which stands for more."""
    # A step is 2^(max(E, floor) - 134 - fraction), a unit 2^(max(E, 1) - 150). One of 2^31 units leaves every cell.
    shift = S(max(S(W(bits >> W(23)) & W(0xFF)), S(floor)) - exponent_of(bits))
    return min(S(shift + S(S(16) - S(fraction))), S(31))


@inlined
def distances(bits: Any) -> Any:
    """Return the units to the border of a weight's cell away from zero, those to the border towards zero, and 1 if the
    bit pattern of the cell's number is odd, so that a border belongs to the next cell, else 0: int32.

    The view may be a power of two that is the weight's next binade, whose numbers are twice as far apart. If it is that
    of the weight's own, the border towards zero lies among numbers that are half as far apart.
    """
    # Within a binade, numbers that follow each other have bit patterns that do: their difference is one of units.
    magnitude = S(bits & W(UNSIGNED))
    middle = S(S(view_of(W(magnitude))) << S(16))
    ahead = S(middle - magnitude)
    # A cell reaches half a BF16 unit, 0x8000 units, to both sides of its number, but for the two cases above.
    leaves = S(max(middle >> S(23), S(1)) > max(magnitude >> S(23), S(1)))
    enters = S(S(middle & S(0x7F0000)) == S(0)) & S(middle >= S(0x01000000)) & S(ahead <= S(0))
    odd = S(middle >> S(16)) & S(1)
    return S(ahead + S(S(0x8000) << leaves)), S(S(S(0x8000) >> enters) - ahead), odd


@inlined
def least_steps(distance: Any, shift: Any, odd: Any) -> Any:
    """Return how many steps, each of 2^shift units, leave a cell whose border is `distance` units away: int32. `odd` is
    1 if the border itself belongs to the next cell.
    """
    # A whole number of steps may end at the border itself, which belongs to the number whose bit pattern is even.
    exact = S(S(distance & S(S(S(1) << shift) - S(1))) == S(0))
    return S(S(distance >> shift) + S(S(1) - S(exact & odd)))


@inlined
def borders(bits: Any, shift: Any) -> Any:
    """Return the least steps, of 2^shift units with a shift from 0 to 31, that leave a weight's cell away from zero,
    and those that leave it towards zero: int32.
    """
    above, below, odd = distances(bits)
    return least_steps(above, shift, odd), least_steps(below, shift, odd)


@inlined
def rank_of(steps: Any, outwards: Any, least_out: Any, least_in: Any) -> Any:
    """Return the rank of a visible value of some steps, from 0 on: int32. `outwards` is 1 if it moves the weight away
    from zero, else 0; for the least steps see `borders`.
    """
    # Below `far` steps only one direction is visible, so each size has one value; from there on each has two.
    near, far = min(least_out, least_in), max(least_out, least_in)
    second = S(outwards != S(least_out <= least_in))
    beyond = S(S(far - near) + S(S(S(steps - far) << S(1)) + second))
    return S(steps - near) if steps < far else beyond


@inlined
def value_at(rank: Any, least_out: Any, least_in: Any) -> Any:
    """Return the visible value of a rank: its size in steps, and 1 if it moves the weight away from zero: int32."""
    # `rest` counts the values from those of `far` steps on, two of each size; before them it is negative.
    near, far = min(least_out, least_in), max(least_out, least_in)
    rest = S(rank - S(far - near))
    second = S(rest >= S(0)) & S(rest & S(1))
    steps = S(near + rank) if rest < S(0) else S(far + S(rest >> S(1)))
    return steps, S(S(least_out <= least_in) != second)


@inlined
def exact_rank(bits: Any, code: Any) -> Any:
    """Return the rank of an exact value (bit pattern `code`): int32; -1 if it has none.

    A value has none if it is no multiple of the weight's unit, has more than MAX_UNITS units, or does no more than to
    change the sign of a weight near 0.
    """
    # The value is mantissa * 2^(its exponent - 150); a normal number has a leading one. In units of the weight that is
    # the mantissa, shifted: left by more than 1, it is over MAX_UNITS, and right, it must lose no bit.
    magnitude = S(code & W(UNSIGNED))
    exponent = S(magnitude >> S(23))
    mantissa = S(S(magnitude & S(0x7FFFFF)) | S(S(exponent > S(0)) << S(23)))
    shift = S(max(exponent, S(1)) - exponent_of(bits))
    left_shift, right_shift = min(max(shift, S(0)), S(1)), min(max(S(-shift), S(0)), S(31))
    units = S(S(mantissa << left_shift) >> right_shift)
    least_out, least_in = borders(bits, S(0))
    outwards = S(W(code ^ bits) >> W(31))
    least = least_out if outwards != S(0) else least_in
    whole = S(S(units << right_shift) == S(mantissa << left_shift)) & S(shift <= S(1)) & S(units <= S(MAX_UNITS))
    has_rank = whole & S(units >= least)
    return rank_of(units, outwards, least_out, least_in) if has_rank != S(0) else S(-1)


@inlined
def exact_value(bits: Any, rank: Any) -> Any:
    """Return the bit pattern of the exact value of a rank (uint32), and 1 if it has at most MAX_UNITS units."""
    least_out, least_in = borders(bits, S(0))
    units, outwards = value_at(rank, least_out, least_in)
    exponent = S(exponent_of(bits) - S(150))
    # Exact: at most 2^24 units fit in float32, and the result is a multiple of 2^-149. Two factors, since that is not a
    # normal number.
    first = max(exponent, S(-100))
    scale = float_of(W(first + S(127)) << W(23))
    rest = float_of(W(S(exponent - first) + S(127)) << W(23))
    magnitude = bits_of_float(F(F(units) * scale) * rest)
    negative = W(outwards) ^ W(bits >> W(31))
    return W(magnitude | W(negative << W(31))), S(units <= S(MAX_UNITS))


@inlined
def grid_rank(bits: Any, value: Any, floor: Any, fraction: Any) -> Any:
    """Return the rank of a visible value on the grid (bit pattern `value`): int32."""
    # The value is a multiple of the step, a power of two: so the product is a whole number, exactly.
    _, per_step = grid_step(bits, floor, fraction)
    steps = S(float_of(W(value & W(UNSIGNED))) * per_step)
    least_out, least_in = borders(bits, grid_shift(bits, floor, fraction))
    return rank_of(steps, S(W(value ^ bits) >> W(31)), least_out, least_in)


@inlined
def grid_value(bits: Any, rank: Any, floor: Any, fraction: Any) -> Any:
    """Return the bit pattern of the grid value of a rank (uint32), and 1 if it has at most MAX_STEPS steps."""
    step, _ = grid_step(bits, floor, fraction)
    least_out, least_in = borders(bits, grid_shift(bits, floor, fraction))
    steps, outwards = value_at(rank, least_out, least_in)
    negative = W(outwards) ^ W(bits >> W(31))
    return W(bits_of_float(F(steps) * step) | W(negative << W(31))), S(steps <= S(MAX_STEPS))
