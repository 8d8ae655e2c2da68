"""Elements as integers: bit patterns, their order, their exponents (docs/spec/patch.md, section 1).

Floats are sign-magnitude, so their bit patterns, turned over for negative numbers, are ordered like the numbers, and a
step of 1 is one unit in the last place. -0.0 lies one step below 0.0, NaNs beyond the infinities: every pattern has its
own place.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

Bits = NDArray[Any]
"""A tensor's elements, flat, as uint8, uint16 or uint32."""

_unsigned: Final[dict[int, Any]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_unsigned_torch: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a dtype keeps what the codec looks at.

    Attributes:
        bits: width of an element.
        mantissa: bits below the exponent.
        exponents: how many exponents there are; 1 for integers, which have none.
        signed: a float (sign-magnitude) or a two's complement integer; False for uint8.
    """

    bits: int
    mantissa: int
    exponents: int
    is_float: bool
    signed: bool

    @property
    def group_shift(self) -> int:
        """How far a bit pattern is shifted to leave sign and exponent; integers are all in one group."""
        return self.mantissa if self.is_float else self.bits

    @property
    def groups(self) -> int:
        """Values that are left after the shift."""
        return 2 * self.exponents if self.is_float else 1

    @property
    def order(self) -> NDArray[np.uint64]:
        """What a kernel puts patterns in order with: uint64[4].

        How far a pattern is shifted to bring its top bit to bit 63, the bits that a positive pattern flips, those that
        a negative one flips otherwise, the last place in the order.
        """
        top, last = 1 << (self.bits - 1), (1 << self.bits) - 1
        positive = top if self.signed else 0
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
    """The layout of a dtype that may travel (protocol.digest.type_names)."""
    return _layouts[dtype]


def bits_of(tensor: torch.Tensor) -> Bits:
    """The tensor's bit patterns, flat; shares its memory where that is aligned.

    Raises:
        ValueError: the tensor is not contiguous or not on the CPU.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("patches are made of contiguous CPU tensors")
    width = tensor.dtype.itemsize
    flat = tensor.detach().reshape(-1).view(_unsigned_torch[width]).numpy()
    bits: Bits = flat.view(_unsigned[width])
    return bits if bits.flags.aligned else bits.copy()


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor of the same dtype and shape. numpy asks for huge pages, torch does not: half the time of a large
    patch.
    """
    if tensor.numel() == 0:
        return torch.empty_like(tensor, requires_grad=False)
    room = np.empty(tensor.numel(), _unsigned[tensor.dtype.itemsize])
    return torch.from_numpy(room.view(np.uint8)).view(tensor.dtype).reshape(tensor.shape)


def ordered(bits: Bits, layout: Layout) -> Bits:
    """Bit patterns to ordered unsigned integers of the same width."""
    if not layout.signed:
        return bits.copy()
    top = bits.dtype.type(1 << (layout.bits - 1))
    turned: Bits = bits ^ (_all_if(bits >> bits.dtype.type(layout.bits - 1)) | top) if layout.is_float else bits ^ top
    return turned


def unordered(keys: Bits, layout: Layout) -> Bits:
    """The inverse of `ordered`."""
    if not layout.signed:
        return keys.copy()
    one, top = keys.dtype.type(1), keys.dtype.type(1 << (layout.bits - 1))
    turned: Bits = keys ^ (((keys >> keys.dtype.type(layout.bits - 1)) - one) | top) if layout.is_float else keys ^ top
    return turned


def _all_if(flags: Bits) -> Bits:
    """All bits of the elements that are 1, none of those that are 0."""
    every: Bits = flags.dtype.type(0) - flags
    return every
