"""The contents of a patch, for `grailnode inspect PATCH [--json] [--base FILE]`.

Everything but the bound is read from the table and the frames' directories, without weights. With the base weights the
patch is applied, and the bound of each tensor (protocol/patch/inspection.py) is computed.
"""

from dataclasses import dataclass

from protocol.digest import Weights, digest_weights, type_name
from protocol.errors import PatchError
from protocol.patch import Mode, apply, summary
from protocol.patch.inspection import bound_bits, frame_facts


@dataclass(frozen=True, slots=True)
class InspectedTensor:
    """One tensor of a patch.

    Attributes:
        codec: mode of the tensor (unchanged, sparse, step_planes, value_planes, xor_planes, stored).
        density: share of the elements that change.
        listed: changes coded outside the classes.
        sections: bytes of a sparse frame by part and section.
        invertible: whether the older tensor follows from the newer one and the patch.
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
    listed: int
    sections: dict[str, int]
    invertible: bool
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
    invertible: bool
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
        bound = bound_bits(base[row.name], newer[row.name]) if base is not None and newer is not None else None
        tensors.append(
            InspectedTensor(
                row.name,
                type_name(row.dtype),
                row.shape,
                row.mode.name.lower(),
                row.elements,
                row.changed,
                facts.density,
                row.size,
                facts.bits_per_change,
                facts.classes,
                facts.listed,
                facts.sections,
                row.mode != Mode.VALUE_PLANES,
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
        invertible=all(row.invertible for row in tensors),
        bound=sum((row.bound or 0.0) * row.changed for row in tensors) / max(1, whole.changed)
        if base is not None
        else None,
        tensors=tuple(tensors),
    )
