"""Elements as integers: bit patterns, ordered keys, exponents (docs/spec/patch.md, section 1).

A key is an unsigned integer with the order of the elements. Floats are sign-magnitude, so with all bits of negative
numbers inverted, their bit patterns are ordered like the numbers. A step of 1 between keys is one unit in the last
place. -0.0 is one step below 0.0, and NaNs lie beyond the infinities: every bit pattern has a key of its own.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

Bits = NDArray[Any]
"""A tensor's elements, flat, as uint8, uint16 or uint32."""

Decoded = tuple[int, Bits, NDArray[np.int64]]
"""A piece of a decoded tensor: the index of its first element, its new elements, and which of these differ from the old
ones, as indices in the piece, distinct and in any order.
"""

_unsigned: Final[dict[int, Any]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_unsigned_torch: Final = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


@dataclass(frozen=True, slots=True)
class Layout:
    """The bit layout of a dtype."""

    bits: int  # width of an element
    mantissa: int  # number of bits below the exponent
    exponents: int  # number of exponents; 1 for integers, which have none
    is_float: bool
    is_signed: bool  # True for a float (sign-magnitude) or a two's complement integer, False for uint8

    @property
    def group_shift(self) -> int:
        """The right shift that leaves only sign and exponent of a bit pattern; it leaves 0 of an integer."""
        return self.mantissa if self.is_float else self.bits

    @property
    def order(self) -> NDArray[np.uint64]:
        """The constants with which kernels convert bit patterns to keys: uint64[4].

        They are the left shift that brings the top bit to bit 63, the bits that change in a positive pattern, the bits
        that change in a negative pattern and not in a positive one, and the largest key.
        """
        top, last = 1 << (self.bits - 1), (1 << self.bits) - 1
        positive = top if self.is_signed else 0
        negative = last if self.is_float else positive
        return np.array((64 - self.bits, positive, positive ^ negative, last), dtype=np.uint64)


_layouts: Final[dict[torch.dtype, Layout]] = {
    torch.bfloat16: Layout(16, 7, 256, True, True),
    torch.float16: Layout(16, 10, 32, True, True),
    torch.float32: Layout(32, 23, 256, True, True),
    torch.float8_e4m3fn: Layout(8, 3, 16, True, True),
    torch.float8_e5m2: Layout(8, 2, 32, True, True),
    torch.int8: Layout(8, 0, 1, False, True),
    torch.uint8: Layout(8, 0, 1, False, False),
    torch.int16: Layout(16, 0, 1, False, True),
    torch.int32: Layout(32, 0, 1, False, True),
}


def layout_of(dtype: torch.dtype) -> Layout:
    """Return the layout of a dtype that weights may have (protocol.digest.type_names)."""
    return _layouts[dtype]


def bits_of(tensor: torch.Tensor) -> Bits:
    """Return the bit patterns of a contiguous tensor on the CPU, flat; they share its memory if that is aligned."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("a patch needs contiguous tensors on the CPU")
    # numpy has no BF16 and no FP8, so the elements go there as integers of their width.
    plain = tensor.detach() if tensor.requires_grad else tensor
    bits: Bits = plain.view(_unsigned_torch[tensor.dtype.itemsize]).numpy().reshape(-1)
    return bits if bits.flags.aligned else bits.copy()


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new tensor of the same dtype and shape. Numpy requests huge pages: half the time of a large patch."""
    if tensor.nbytes < 1 << 21:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    buffer = np.empty(tensor.numel(), _unsigned[tensor.dtype.itemsize])
    return torch.from_numpy(buffer.view(np.uint8)).view(tensor.dtype).reshape(tensor.shape)


def copy_bits(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Write the bit patterns of a tensor into another one of its dtype and shape, and return that."""
    if source.numel():
        bits_of(target)[:] = bits_of(source)
    return target


def to_keys(bits: Bits, layout: Layout) -> Bits:
    """Convert bit patterns to keys: unsigned integers of the same width, in the order of the elements."""
    if not layout.is_signed:
        return bits.copy()
    # The top bit inverted puts positive numbers above negative ones. In a negative float all other bits are inverted as
    # well, since its magnitude grows downwards.
    top = bits.dtype.type(1 << (layout.bits - 1))
    zero, sign = bits.dtype.type(0), bits >> bits.dtype.type(layout.bits - 1)
    keys: Bits = bits ^ ((zero - sign) | top) if layout.is_float else bits ^ top
    return keys


def from_keys(keys: Bits, layout: Layout) -> Bits:
    """Convert keys back to bit patterns, as the inverse of `to_keys`."""
    if not layout.is_signed:
        return keys.copy()
    # The top bit of a key is 1 for a positive number and 0 for a negative one; minus 1, that is no bit, or all bits.
    one, top = keys.dtype.type(1), keys.dtype.type(1 << (layout.bits - 1))
    bits: Bits = keys ^ (((keys >> keys.dtype.type(layout.bits - 1)) - one) | top) if layout.is_float else keys ^ top
    return bits
