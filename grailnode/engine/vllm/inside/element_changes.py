"""Changes of single elements in the parameters of the serving model: found while staging, exchanged at a commit.

A change takes 6 bytes for weights in BF16: a place and a value. On a CPU, compiled loops find and exchange them without
the GIL. On a GPU they are copied to it while staging, and torch exchanges them.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grailnode.engine.vllm.inside.tensor_map import Piece, Placement
from protocol.kernels.jit import Int64Array, UInt16Array, UInt64Array, kernel
from protocol.patch.values import Bits


@dataclass
class ElementChange:
    """New values for elements of one parameter. After `swap` it holds the old ones."""

    target: Tensor  # int [S], the parameter's storage
    places: Tensor  # int32 or int64 [N], distinct, into the storage
    values: Tensor  # int [N] of the target's dtype
    overwritten: Tensor | None = None  # the old elements while a swap on a GPU is under way
    is_swapped: bool = False

    def swap(self) -> None:
        """Exchange the elements in the parameter with the values."""
        if self.target.device.type == "cpu":
            arrays = [tensor.numpy() for tensor in (self.target, self.places, self.values)]
            _exchange(*arrays)
        else:
            # Kept on the object before the write: if the write fails half-way, `undo` has the old elements.
            self.overwritten = self.target[self.places]
            self.target[self.places] = self.values
            self.values, self.overwritten = self.overwritten, None
        self.is_swapped = not self.is_swapped

    def undo(self) -> None:
        """Bring the old elements back after a swap, or after one that failed or was not begun."""
        if self.overwritten is not None:
            self.target[self.places] = self.overwritten
        elif self.is_swapped:
            self.swap()


def element_changes(placement: Placement, indices: NDArray[np.int64], values: Bits) -> list[ElementChange]:
    """Return the changes of those parts of a tensor that lie on this rank, from the distinct indices [N] of changed
    elements of the flat tensor, and their new BF16 bits: uint16 [N].
    """
    return [_change(piece, indices, values) for piece in placement.pieces]


def _change(piece: Piece, indices: NDArray[np.int64], values: Bits) -> ElementChange:
    # Half the memory of int64, where the storage is small enough.
    kind = torch.int32 if piece.target.numel() < 1 << 31 else torch.int64
    places, new_values = torch.empty(indices.size, dtype=kind), np.empty(indices.size, np.uint16)
    dimensions = np.array(piece.dimensions, np.uint64).reshape(-1, 3)
    offsets = piece.source_offset, piece.target_offset
    place_count = _locate(indices, values, dimensions, *offsets, places.numpy(), new_values)
    new = widen(torch.from_numpy(new_values[:place_count].view(np.int16)), piece.target.dtype)
    # Compiled or copied while staging, so that the commit waits for neither.
    device = piece.target.device
    if device.type == "cpu":
        _exchange(*(tensor[:0].numpy() for tensor in (piece.target, places, new)))
    with copies_beside(device):
        return ElementChange(piece.target, places[:place_count].to(device), new.to(device))


def copies_beside(device: torch.device) -> AbstractContextManager[Any]:
    """Give copies from and to a GPU a stream of their own, in which each waits for itself alone: in the default stream
    it would wait for the steps of the model that are queued there, and they for it. A commit waits for all streams.
    """
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    return torch.cuda.stream(stream)


def widen(bits: Tensor, kind: torch.dtype) -> Tensor:
    """Convert the bits of BF16 numbers to those of the served dtype: to int16, or to int32 for float32."""
    return bits if kind == torch.int16 else bits.to(torch.int32) << 16


@kernel
def _locate(
    indices: Int64Array,
    values: UInt16Array,
    dimensions: UInt64Array,
    source_offset: int,
    target_offset: int,
    places: NDArray[Any],
    new_values: UInt16Array,
) -> Any:
    """Write a piece's share of changes [N] to `places` in the storage and `new_values`; return how many they are."""
    place_count = np.uint64(0)
    for number in range(indices.size):
        # An element's index is source_offset + sum of step[d] * stride[d]. Dividing by the largest stride first gives
        # each step, because `_is_nested` has checked that no smaller strides together reach it. An index before the
        # piece becomes a huge number, and so a step outside of it.
        rest, place, inside = np.uint64(indices[number] - source_offset), np.uint64(target_offset), True
        for dimension in range(dimensions.shape[0]):
            size, stride = dimensions[dimension, 0], dimensions[dimension, 1]
            step = rest if stride == np.uint64(1) else rest // stride
            inside = inside and step < size
            place += step * dimensions[dimension, 2]
            rest -= step * stride
        # What is left lies between the elements of the piece, so it belongs to another one.
        if inside and rest == np.uint64(0):
            places[place_count], new_values[place_count] = place, values[number]
            place_count += np.uint64(1)
    return np.int64(place_count)


@kernel
def _exchange(target: NDArray[Any], places: NDArray[Any], values: NDArray[Any]) -> None:
    # Every place lies in the target: `_locate` found it there. So this cannot fail half-way.
    for number in range(places.size):
        place = np.uint64(places[number])
        target[place], values[number] = values[number], target[place]
