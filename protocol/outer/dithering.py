"""FP32 masters that begin anywhere in the interval that rounds to their BF16 weight, and not in its middle.

A checkpoint in BF16 has each weight in the middle of its interval. A step of 3e-6 moves only the smallest weights out
of theirs, so almost nothing of the first steps is published: the policy learns only when steps add up to half a unit in
the last place. Dithering (Roberts 1962) spreads the masters evenly, as they are after long training. From the first
step on, the published weights change on average by as much as the masters. Those of version 0 stay the same, bit for
bit.
"""

import hashlib
from typing import Final

import torch
from torch import Tensor

from protocol.digest import Weights
from protocol.outer.round_records import RoundRules
from protocol.outer.shared_state import SharedState

_HALF: Final = 0x7FFF
"""The bits of a float32 whose lower half is 0 may change by this much, and are still rounded to the same BF16."""

_EXPONENT: Final = 0x7F80_0000
_BLOCK: Final = 1 << 20
"""Elements of a master that are moved at a time, so that no copy is as large as it."""


def dither(name: str, master: Tensor) -> Tensor:
    """Move the elements of a master, contiguous float32, within what is rounded to their BF16 weights, in place, and
    return it. The moves are a function of the tensor's name, the same in each process.

    Elements that are no BF16 numbers stay, and so do zeros, subnormal numbers, infinities and NaN.
    """
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    generator = torch.Generator().manual_seed(seed >> 1)
    for bits in master.view(torch.int32).view(-1).split(_BLOCK):  # type: ignore[no-untyped-call]
        moves = torch.randint(-_HALF, _HALF + 1, bits.shape, dtype=torch.int32, generator=generator).to(bits.device)
        exponents = bits & _EXPONENT
        # 0 minus a bit would be a NaN, and a NaN plus one another NaN
        bits.add_(moves * ((exponents != 0) & (exponents != _EXPONENT) & (bits & 0xFFFF == 0)))
    return master


def first_state(weights: Weights, rules: RoundRules) -> SharedState:
    """Return the state of manifest 0 from BF16 weights, dithered: the first rounds change the policy as later ones."""
    floats = {
        name: weight.detach().to("cpu", torch.float32, copy=True).contiguous() for name, weight in weights.items()
    }
    masters = {name: dither(name, master) for name, master in floats.items()}
    return SharedState.begin(masters, has_momentum=rules.momentum > 0)
