"""Small-change frames: the gap and the step of each of a few changes, without the cost of a model (docs/spec/patch.md,
section 4).
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import MalformedError, PatchError
from protocol.patch.bounded_buffer import gather
from protocol.patch.container import Cursor, varint
from protocol.patch.values import Bits, Layout, from_keys, to_keys

MAX_SMALL_CHANGES: Final = 32
"""Changed elements of a small-change frame."""
BLOCK_ELEMENTS: Final = 1 << 16
_WHERE: Final = "small-change frame"


def find_small_changes(old: Bits, new: Bits) -> NDArray[np.int64] | None:
    """Return the indices of all changed elements, ascending, or None if there are more than MAX_SMALL_CHANGES.

    Args:
        old, new: the previous and the new elements, flat.
    """
    blocks: list[NDArray[np.int64]] = []
    count = 0
    for begin in range(0, old.size, BLOCK_ELEMENTS):
        block = slice(begin, begin + BLOCK_ELEMENTS)
        differs = old[block] != new[block]
        if differs.any():
            blocks.append(np.flatnonzero(differs) + begin)
            count += blocks[-1].size
            if count > MAX_SMALL_CHANGES:
                return None
    return np.concatenate(blocks) if blocks else np.empty(0, np.int64)


def encode_small_changes(old: Bits, new: Bits, places: NDArray[np.int64], layout: Layout, below: int) -> memoryview:
    """Encode the frame of the changes at `places`.

    Args:
        old, new: the previous and the new elements, flat.
        places: indices of the changed elements, ascending.
        below: size that the frame must stay below, in bytes.
    """
    gaps = np.diff(places, prepend=-1) - 1
    steps = to_keys(new[places], layout).astype(np.int64) - to_keys(old[places], layout).astype(np.int64)
    zigzags = np.where(steps < 0, -2 * steps - 1, 2 * steps)
    pairs = zip(gaps.tolist(), zigzags.tolist(), strict=True)
    return gather((varint(number) for pair in pairs for number in pair), below - 1)


def _read(
    frame: memoryview, elements: int, changes: int, layout: Layout
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices and the steps of the changes."""
    if changes > MAX_SMALL_CHANGES:
        raise MalformedError(f"{changes} changes where at most {MAX_SMALL_CHANGES} are allowed", _WHERE)
    cursor = Cursor(frame, _WHERE)
    places, steps, place = [], [], -1
    for _ in range(changes):
        place += 1 + cursor.varint(elements)
        if place >= elements:
            raise PatchError("a gap past the end", _WHERE)
        zigzag = cursor.varint((1 << (layout.bits + 1)) - 1)
        if not zigzag:
            raise PatchError("a step of size 0", _WHERE)
        places.append(place)
        steps.append(-(zigzag + 1 >> 1) if zigzag & 1 else zigzag >> 1)
    cursor.finish()
    return np.array(places, np.int64), np.array(steps, np.int64)


def decode_small_changes(old: Bits, frame: memoryview, changes: int, layout: Layout) -> Iterator[tuple[int, Bits]]:
    """Yield the new elements of a tensor, block by block.

    Args:
        old: the previous elements, flat.
        frame: hostile bytes.
        changes: number of changed elements in the table.

    Yields:
        The offset of a block in `old`, and its elements.

    Raises:
        MalformedError, LimitError: the frame does not have the form in docs/spec/patch.md.
        PatchError: a gap leads past the end, or a step has size 0 or leaves the dtype.
    """
    places, steps = _read(frame, old.size, changes, layout)
    keys = to_keys(old[places], layout).astype(np.int64) + steps
    if ((keys < 0) | (keys >> layout.bits != 0)).any():
        raise PatchError("a step out of the dtype", _WHERE)
    elements = from_keys(keys.astype(old.dtype), layout)
    for begin in range(0, old.size, BLOCK_ELEMENTS):
        block: Bits = old[begin : begin + BLOCK_ELEMENTS].copy()
        inside = (places >= begin) & (places < begin + BLOCK_ELEMENTS)
        block[places[inside] - begin] = elements[inside]
        yield begin, block
