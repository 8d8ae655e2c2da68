"""Weights as parts, which are coded one after the other (docs/spec/pseudogradient.md, section 1)."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
import torch

from protocol.digest import Weights
from protocol.errors import ContributionError
from protocol.pseudogradient.arithmetic import Floats

PART_ELEMENTS: Final = 1 << 20
"""A part ends with the tensor that brings it to so many elements; the last part may have fewer."""


@dataclass(frozen=True, slots=True)
class Part:
    """A run of tensors in ascending order of names."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return sum(map(prod, self.shapes))

    def gather(self, weights: Weights) -> Floats:
        """Return the part's elements, flat; they share the memory of a single tensor. ContributionError if a tensor has
        another shape, is no float32, or is not contiguous on the CPU.
        """
        arrays = []
        for name, shape in zip(self.names, self.shapes, strict=True):
            tensor = weights[name]
            # The bytes of the payload are those of the elements in memory, so nothing is converted silently.
            plain = tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype == torch.float32
            if not plain or tuple(tensor.shape) != shape:
                raise ContributionError(f"not a contiguous float32 tensor of the shape {shape} on the CPU", name)
            arrays.append(tensor.detach().reshape(-1).numpy())
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def scatter(self, values: Floats) -> dict[str, torch.Tensor]:
        """Return a part's elements as tensors by name, which share the memory of `values`."""
        tensors, begin = {}, 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            end = begin + prod(shape)
            tensors[name] = torch.from_numpy(values[begin:end]).reshape(shape)
            begin = end
        return tensors


def parts_of(shapes: Mapping[str, Sequence[int]]) -> tuple[Part, ...]:
    """Return the parts of weights with these shapes, by name."""
    # Names ascend, so all sites cut alike. A tensor is never divided, and small ones share a part.
    parts: list[Part] = []
    names: list[str] = []
    elements = 0
    ordered = sorted(shapes)
    for name in ordered:
        names.append(name)
        elements += prod(shapes[name])
        if elements >= PART_ELEMENTS or name == ordered[-1]:
            parts.append(Part(tuple(names), tuple(tuple(shapes[own]) for own in names)))
            names, elements = [], 0
    return tuple(parts)


def streams_of(names: Iterable[str], count: int) -> tuple[tuple[str, ...], ...]:
    """Distribute tensors over at most `count` streams that are sent in turn (SparseLoCo, appendix D).

    The hidden layers are divided evenly, in their order. The layer is the first number among the dotted parts of a
    name. Of tensors outside of the layers, those whose name contains "head" or "norm" are in the last stream, and
    others, such as the embedding, in the first. A stream without tensors is left out.
    """
    # By names only, which all sites have: nobody must be told how the tensors are divided.
    names = sorted(names)
    layers = {name: int(match.group(1)) for name in names if (match := re.search(r"(?:^|\.)(\d+)\.", name))}
    total = max(layers.values(), default=-1) + 1

    def stream(name: str) -> int:
        if name in layers:
            return layers[name] * count // total
        return count - 1 if "head" in name or "norm" in name else 0

    streams = (tuple(name for name in names if stream(name) == number) for number in range(count))
    return tuple(names for names in streams if names)
