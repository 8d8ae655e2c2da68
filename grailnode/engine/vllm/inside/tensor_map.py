"""Finds where each tensor of a checkpoint lies in the parameters of a model that vLLM has loaded.

vLLM fuses parameters (qkv_proj, gate_up_proj), stacks experts, pads the vocabulary and gives each rank its shard, and
every architecture does so in a loader of its own. Instead of repeating those rules, this runs the model's own loader
once, with tensors that are never read, and records every copy that it would make. Nothing is written.

A loader that does anything else with a tensor (quantizes, transposes into a copy, adds) leaves elements without a
place, and the model is refused with the names of the tensors. That vLLM computes with the layout of the map, which
writes the weights and reads them back, is what `layout_check.py` compares with the torch model (docs/adr/0351).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Shapes = Mapping[str, tuple[int, ...]]
Loader = Callable[[Iterable[tuple[str, Tensor]]], object]


class UnsupportedModelError(Exception):
    """A patch cannot be written into this model; the message names the tensor and the reason."""


@dataclass(frozen=True)
class Piece:
    """A part of a checkpoint tensor, and its place in a parameter. Offsets and strides count elements.

    `dimensions` are size, stride in the checkpoint tensor, which is contiguous, and stride in `target`: as few as there
    can be, the largest strides in the checkpoint tensor first.
    """

    dimensions: tuple[tuple[int, int, int], ...]
    source_offset: int
    target: Tensor  # the parameter's whole storage, as integers of the parameter's width: [S]
    target_offset: int

    @classmethod
    def of(cls, source: Tensor, target: Tensor) -> Self:
        """Return the piece of a copy from a checkpoint tensor to a parameter, of the same shape."""
        dimensions: list[tuple[int, int, int]] = []
        each = zip(target.shape, source.stride(), target.stride(), strict=True)
        for size, stride, target_stride in sorted(each, key=lambda dimension: -dimension[1]):
            # Rows that follow each other on both sides are one longer row.
            if dimensions and dimensions[-1][1:] == (size * stride, size * target_stride):
                dimensions[-1] = dimensions[-1][0] * size, stride, target_stride
            elif size != 1:
                dimensions.append((size, stride, target_stride))
        offsets = int(source.storage_offset()), int(target.storage_offset())
        return cls(tuple(dimensions), offsets[0], integer_storage(target), offsets[1])

    @property
    def elements(self) -> int:
        return math.prod(size for size, _, _ in self.dimensions)

    @property
    def view(self) -> Tensor:
        """The part in the parameter's storage."""
        shape, strides = [size for size, _, _ in self.dimensions], [stride for _, _, stride in self.dimensions]
        return self.target.as_strided(shape, strides, self.target_offset)

    @property
    def halves(self) -> tuple[Tensor, Tensor]:
        """The lower and the upper halves of the part's float32 numbers, as int16, in the parameter's storage."""
        shape, strides = [size for size, _, _ in self.dimensions], [2 * stride for _, _, stride in self.dimensions]
        halves, offset = self.target.view(torch.int16), 2 * self.target_offset
        return halves.as_strided(shape, strides, offset), halves.as_strided(shape, strides, offset + 1)

    def source_view(self, tensor: Tensor) -> Tensor:
        """Return the part in a contiguous tensor of the checkpoint's shape."""
        shape, strides = [size for size, _, _ in self.dimensions], [stride for _, stride, _ in self.dimensions]
        return tensor.view(-1).as_strided(shape, strides, self.source_offset)


@dataclass(frozen=True)
class Placement:
    """Where a tensor of the checkpoint lies: its shape, and its parts on this rank."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


TensorMap = dict[str, Placement]

_integers = {torch.bfloat16: torch.int16, torch.float32: torch.int32}  # in which no bit pattern changes on the way


def integer_storage(tensor: Tensor) -> Tensor:
    """Return the whole storage of a BF16 or float32 tensor as int16 or int32, flat, sharing its memory."""
    kind = _integers[tensor.dtype]
    return torch.empty(0, dtype=kind, device=tensor.device).set_(tensor.untyped_storage())


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the copies out of checkpoint tensors, and suppresses every write into the model's memory."""

    def __init__(self, sources: Mapping[int, str], tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # A loader passes our tensors on as views, so a source is known by its storage, which all views share.
        self._sources = sources
        self._memory = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}
        self.pieces: dict[str, list[Piece]] = {}
        self.faults: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Only a plain copy of a checkpoint tensor has a place; another write leaves its elements without one.
        target = args[0] if func._schema.is_mutable and args else None
        if isinstance(target, Tensor) and target.untyped_storage().data_ptr() in self._memory:
            if func is torch.ops.aten.copy_.default:
                self._record(target, args[1])
            return target
        if func is torch.ops.aten._pin_memory.default:
            return args[0]  # a copy of a tensor that is never read, and by which it would no longer be known
        return func(*args, **(kwargs or {}))

    def _record(self, target: Tensor, source: Tensor) -> None:
        name = self._sources.get(source.untyped_storage().data_ptr())
        if name is None:
            return  # computed from a checkpoint tensor or not: its elements stay without a place
        if target.dtype not in _integers:
            self.faults[name] = f"it is served as {target.dtype}; only bfloat16 and float32 can be patched"
            return
        # A loader may copy one row into many: after the expansion both sides have the same shape, and the strides of 0
        # make `_is_nested` refuse it.
        self.pieces.setdefault(name, []).append(Piece.of(source.expand(target.shape), target))


def map_tensors(
    model: torch.nn.Module,
    shapes: Shapes,
    *,
    whole: bool = True,
    adapter: tuple[Loader, Sequence[Tensor]] | None = None,
) -> TensorMap:
    """Find where tensors lie in a model of vLLM with loaded weights; UnsupportedModelError if an element has no place,
    or more than one. All lie on this rank if it is `whole`, so without tensor parallelism. For tensors of an adapter
    there are what loads it, and the memory into which it is loaded.
    """
    # The tensors live until the loader is done: a storage that was freed could get the address of another one.
    tensors = {name: torch.empty(shape, dtype=torch.bfloat16, device="cpu") for name, shape in shapes.items()}
    sources = {tensor.untyped_storage().data_ptr(): name for name, tensor in tensors.items()}
    load, memory = adapter or (model.load_weights, [*model.parameters(), *model.buffers()])
    with torch.inference_mode(False), torch.no_grad(), _Recorder(sources, memory) as recorder:
        try:
            load(iter(tensors.items()))  # type: ignore[operator]
        except Exception as error:  # loaders raise whatever they like for a name or a shape that they do not know
            raise UnsupportedModelError(f"vLLM's loader refuses the tensors of this policy: {error}") from error
    if recorder.faults:
        name = min(recorder.faults)
        raise UnsupportedModelError(f"{name}: {recorder.faults[name]}")
    result = {name: Placement(shape, tuple(recorder.pieces.get(name, ()))) for name, shape in shapes.items()}
    for name, placement in result.items():
        _check(name, placement, whole)
    return result


def _check(name: str, placement: Placement, whole: bool) -> None:
    # Every part has distinct elements: fewer means an element without a place, more an element with two.
    elements = sum(piece.elements for piece in placement.pieces)
    if whole and elements != placement.elements:
        raise UnsupportedModelError(
            f"{name}: vLLM's loader gives a place to {elements} of {placement.elements} elements; this architecture "
            "or quantization cannot be patched in place"
        )
    for piece in placement.pieces:
        if not _is_nested(piece) or not piece.elements:
            raise UnsupportedModelError(f"{name}: its elements are repeated or interleaved in the served parameter")


def _is_nested(piece: Piece) -> bool:
    """Return whether each stride is at least the extent of all smaller ones, so that an index has one place at most."""
    extent = 0
    for size, stride, _ in reversed(piece.dimensions):
        if stride <= extent:
            return False
        extent += stride * (size - 1)
    return True
