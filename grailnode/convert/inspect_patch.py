"""The contents of a patch, for `grailnode inspect PATCH [--json] [--base FILE]`.

A patch names no tensors: without the base weights, its header alone can be shown. With them the patch is applied, and
the bound of each tensor is computed (docs/spec/patch.md, section 6).
"""

from dataclasses import dataclass

import numpy as np
import torch

from protocol.digest import Weights, digest_weights, type_name
from protocol.errors import PatchError
from protocol.patch import apply, summary
from protocol.patch.container import Header, Mode, TensorRow, split_frames, unit_row
from protocol.patch.sparse import read_directory
from protocol.patch.values import bits_of, layout_of, to_keys


@dataclass(frozen=True, slots=True)
class InspectedTensor:
    """One tensor of a patch."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    codec: str  # mode of the tensor (unchanged, sparse, steps, ...); "joined" if another one has its frame
    elements: int
    changed: int  # elements that change
    density: float  # share of the elements that change
    nbytes: int
    bits_per_change: float  # bits of the frame per changed element; 0.0 if nothing changed
    classes: int  # number of classes of the model; 0 if the frame has no classes
    sections: dict[str, int]  # bytes of a sparse frame's sections "words" and "raw"; 0 in other modes
    bound: float  # least bits for a change if only exponents are known


@dataclass(frozen=True, slots=True)
class InspectedPatch:
    """A patch: digests of base and result (hex), sums over its tensors, and with the base weights the tensors, and what
    follows from them; `bound` is for all of them.
    """

    profile: str
    base: str
    result: str
    nbytes: int
    weight_bytes: int | None
    elements: int | None
    changed: int
    bits_per_change: float
    bound: float | None
    tensors: tuple[InspectedTensor, ...]


def inspect_patch(data: bytes, base: Weights | None = None) -> InspectedPatch:
    """Read the facts of a patch, with bounds if its base is given; ProtocolError for no patch, or for another base."""
    header = summary(data)
    if base is not None and digest_weights(base) != header.base:
        raise PatchError(
            f"are {digest_weights(base).hex()[:16]}, and the patch applies to {header.base.hex()[:16]}", "base weights"
        )
    tensors = [] if base is None else _tensors(data, header, base)
    return InspectedPatch(
        profile=header.profile,
        base=header.base.hex(),
        result=header.result.hex(),
        nbytes=len(data),
        weight_bytes=None if base is None else sum(tensor.nbytes for tensor in base.values()),
        elements=None if base is None else sum(tensor.numel() for tensor in base.values()),
        changed=header.changed,
        bits_per_change=8 * len(data) / max(1, header.changed),
        bound=None if base is None else sum(row.bound * row.changed for row in tensors) / max(1, header.changed),
        tensors=tuple(tensors),
    )


def _tensors(data: bytes, header: Header, base: Weights) -> list[InspectedTensor]:
    newer, tensors = apply(base, data), list[InspectedTensor]()
    for unit, frame in split_frames(data, header, header.table.units(base)):
        for row in unit:
            changed = int(np.count_nonzero(bits_of(base[row.name]) != bits_of(newer[row.name])))
            bound = bound_bits(base[row.name], newer[row.name])
            tensors.append(_inspected(row, frame, unit_row(unit).elements, changed, bound))
    return sorted(tensors, key=lambda tensor: tensor.name)


def _inspected(row: TensorRow, frame: memoryview, elements: int, changed: int, bound: float) -> InspectedTensor:
    """Return the facts of a tensor, by its row and the directory of its frame (hostile bytes); no change is decoded."""
    classes, words, raw = 0, 0, 0
    if row.mode == Mode.SPARSE:
        model, chunks = read_directory(frame, elements, row.changed, layout_of(row.dtype))
        classes, words, raw = (
            model.classes,
            sum(2 * chunk.words for chunk in chunks),
            sum(chunk.raw for chunk in chunks),
        )
    return InspectedTensor(
        name=row.name,
        dtype=type_name(row.dtype),
        shape=row.shape,
        codec=row.mode.name.lower(),
        elements=row.elements,
        changed=changed,
        density=changed / max(1, row.elements),
        nbytes=row.size,
        bits_per_change=8 * row.size / row.changed if row.changed else 0.0,
        classes=classes,
        sections={"words": words, "raw": raw},
        bound=bound,
    )


def _entropy_of_counts(counts: np.ndarray) -> float:
    positive = counts[counts > 0].astype(np.float64)
    return float(-(positive * np.log2(positive / positive.sum())).sum()) if positive.size else 0.0


def bound_bits(old: torch.Tensor, new: torch.Tensor) -> float:
    """Compute the empirical conditional entropy of an update, in bits per changed element; 0.0 if nothing changed.

    It is H(changed | exponent of the old value) over all elements plus H(step | exponent of the old value) over the
    changed ones. The probabilities are the tensor's own frequencies, which a decoder does not have. No code that uses
    only the exponent can be smaller.
    """
    layout = layout_of(old.dtype)
    before, after = bits_of(old), bits_of(new)
    differs = before != after
    changes = int(differs.sum())
    if changes == 0:
        return 0.0
    # Integers have one exponent, 0, so all their elements are alike.
    shift = layout.mantissa if layout.is_float else 0
    exponents = (before >> before.dtype.type(shift)) & before.dtype.type(layout.exponents - 1)
    total = 0.0
    steps = to_keys(after[differs], layout).astype(np.int64) - to_keys(before[differs], layout).astype(np.int64)
    for exponent in range(layout.exponents):
        members = int((exponents == exponent).sum())
        own = steps[exponents[differs] == exponent]
        # First whether an element of this exponent changes, then by how much.
        total += _entropy_of_counts(np.array([own.size, members - own.size]))
        total += _entropy_of_counts(np.unique(own, return_counts=True)[1])
    return total / changes
