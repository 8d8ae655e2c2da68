"""Frames of a few changes: each its gap and its step, with no model to pay for (docs/spec/patch.md, section 4)."""

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import MalformedError, PatchError
from protocol.patch.bounded_buffer import gather
from protocol.patch.container import Cursor, varint
from protocol.patch.values import Bits, Layout, ordered, unordered

MAX_FEW: Final = 32
BLOCK_ELEMENTS: Final = 1 << 16


def few_changes(old: Bits, new: Bits) -> NDArray[np.int64] | None:
    """The places of all changes, None when they are more than MAX_FEW; ends at the block that shows it."""
    found: list[NDArray[np.int64]] = []
    count = 0
    for begin in range(0, old.size, BLOCK_ELEMENTS):
        block = slice(begin, begin + BLOCK_ELEMENTS)
        differs = old[block] != new[block]
        if differs.any():
            found.append(np.flatnonzero(differs) + begin)
            count += found[-1].size
            if count > MAX_FEW:
                return None
    return np.concatenate(found) if found else np.empty(0, np.int64)


def encode_few(old: Bits, new: Bits, places: NDArray[np.int64], layout: Layout, below: int) -> memoryview:
    """The frame of the changes at `places`.

    Raises:
        OutOfRoomError: it would take `below` bytes or more.
    """
    gaps = np.diff(places, prepend=-1) - 1
    steps = ordered(new[places], layout).astype(np.int64) - ordered(old[places], layout).astype(np.int64)
    zigzags = np.where(steps < 0, -2 * steps - 1, 2 * steps)
    pairs = zip(gaps.tolist(), zigzags.tolist(), strict=True)
    return gather((varint(number) for pair in pairs for number in pair), below - 1)


def _read(
    frame: memoryview, elements: int, changed: int, layout: Layout
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places and steps."""
    if changed > MAX_FEW:
        raise MalformedError(f"{changed} changes where a frame of few has {MAX_FEW}", "frame of few")
    cursor = Cursor(frame, "frame of few")
    places, steps, place = [], [], -1
    for _ in range(changed):
        place += 1 + cursor.varint(elements)
        if place >= elements:
            raise PatchError("a gap past the end", "frame of few")
        zigzag = cursor.varint((1 << (layout.bits + 1)) - 1)
        if not zigzag:
            raise PatchError("a step of no size", "frame of few")
        places.append(place)
        steps.append(-(zigzag + 1 >> 1) if zigzag & 1 else zigzag >> 1)
    cursor.finish()
    return np.array(places, np.int64), np.array(steps, np.int64)


def decode_few(
    old: Bits, frame: memoryview, changed: int, layout: Layout, *, back: bool = False, first: int = 0,
    of: int | None = None
) -> Iterator[tuple[int, Bits]]:  # fmt: skip
    """The new elements, or the older ones when `back`, block by block.

    Args:
        old: the elements from `first` on, of a tensor of `of` elements; by default all of it.

    Yields:
        The offset of a block in `old`, and its elements.

    Raises:
        MalformedError, LimitError: not the form that docs/spec/patch.md gives.
        PatchError: a gap past the end, a step of no size or out of the dtype.
    """
    places, steps = _read(frame, old.size if of is None else of, changed, layout)
    own = (places >= first) & (places < first + old.size)
    places, steps = places[own] - first, steps[own]
    keys = ordered(old[places], layout).astype(np.int64) + (-steps if back else steps)
    if ((keys < 0) | (keys >> layout.bits != 0)).any():
        raise PatchError("a step out of the dtype", "frame of few")
    changes = unordered(keys.astype(old.dtype), layout)
    for begin in range(0, old.size, BLOCK_ELEMENTS):
        block: Bits = old[begin : begin + BLOCK_ELEMENTS].copy()
        inside = (places >= begin) & (places < begin + BLOCK_ELEMENTS)
        block[places[inside] - begin] = changes[inside]
        yield begin, block
