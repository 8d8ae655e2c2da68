"""The contents of a patch, for `grailnode inspect PATCH [--json] [--base FILE]`.

Everything but the bound is read from the table and the frames' directories, without weights. With the base weights the
patch is applied, and the bound of each tensor (protocol/patch/inspection.py) is computed.
"""

from dataclasses import dataclass

import numpy as np

from protocol.digest import Weights, digest_weights, type_name
from protocol.errors import PatchError
from protocol.patch import apply, summary
from protocol.patch.inspection import bound_bits, frame_facts
from protocol.patch.values import bits_of


@dataclass(frozen=True, slots=True)
class InspectedTensor:
    """One tensor of a patch.

    Attributes:
        codec: mode of the tensor (unchanged, sparse, step_planes, ...); "joined" if another one has its frame.
        changed: elements that change; without the base weights, the frame's, and 0 if it is joined.
        density: share of the elements that change, of all tensors of the frame.
        bound: least bits for a change if only exponents are known; None without the base weights.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    codec: str
    elements: int
    changed: int
    density: float
    nbytes: int
    bits_per_change: float
    classes: int
    sections: dict[str, int]
    bound: float | None


@dataclass(frozen=True, slots=True)
class InspectedPatch:
    """A patch: digests of base and result (hex), sums over its tensors, the tensors; `bound` is for all of them."""

    profile: str
    base: str
    result: str
    nbytes: int
    weight_bytes: int
    elements: int
    changed: int
    bits_per_change: float
    bound: float | None
    tensors: tuple[InspectedTensor, ...]


def inspect_patch(data: bytes, base: Weights | None = None) -> InspectedPatch:
    """Read the facts of a patch.

    Args:
        base: the weights that the patch applies to, to compute the bounds.

    Raises:
        MalformedError, LimitError, PatchError: not a patch, or a patch for other weights than `base`.
    """
    whole = summary(data)
    if base is not None and digest_weights(base) != whole.base:
        raise PatchError(
            f"are {digest_weights(base).hex()[:16]}, and the patch applies to {whole.base.hex()[:16]}", "base weights"
        )
    newer = apply(base, data) if base is not None else None
    tensors = []
    for facts in frame_facts(data):
        row = facts.row
        bound, changed = None, row.changed
        if base is not None and newer is not None:
            before, after = base[row.name], newer[row.name]
            bound, changed = bound_bits(before, after), int(np.count_nonzero(bits_of(before) != bits_of(after)))
        tensors.append(
            InspectedTensor(
                row.name,
                type_name(row.dtype),
                row.shape,
                row.mode.name.lower(),
                row.elements,
                changed,
                facts.density,
                row.size,
                facts.bits_per_change,
                facts.classes,
                facts.sections,
                bound,
            )
        )
    return InspectedPatch(
        profile=whole.profile,
        base=whole.base.hex(),
        result=whole.result.hex(),
        nbytes=whole.nbytes,
        weight_bytes=whole.weight_bytes,
        elements=whole.elements,
        changed=whole.changed,
        bits_per_change=8 * whole.nbytes / max(1, whole.changed),
        bound=sum((row.bound or 0.0) * row.changed for row in tensors) / max(1, whole.changed)
        if base is not None
        else None,
        tensors=tuple(tensors),
    )
