"""Prepares a version beside the one that serves: decode and check (docs/spec/patch.md, section 5).

The engine checks by itself what it will write: the patch is for the weights that it serves, each changed tensor has the
digest in the patch, and all of them together have the digest that the trainer signed. One tensor a thread is in memory,
in which its changes are decoded; what remains are their places and values.
"""

from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from grailnode.engine.vllm.inside.element_changes import ElementChange, element_changes
from grailnode.engine.vllm.inside.rank_steps import Cancelled, RankSteps
from grailnode.engine.vllm.inside.served_weights import ServedWeights, ServedWeightsError, StagedVersion
from protocol.digest import tensor_digest, weights_digest
from protocol.errors import PatchError
from protocol.patch.applying import Changes, apply_unit
from protocol.patch.codec import for_each
from protocol.patch.container import Unit, read_header, split_frames, unit_row
from protocol.patch.values import bits_of

_DENSE = 4  # a tensor of which more than one element in so many changes is written whole, if it may be


def stage_patch(
    engine_weights: ServedWeights,
    version: int,
    patch: bytes,
    digest: bytes,
    cancelled: Cancelled = lambda: False,
    threads: int = 1,
) -> StagedVersion:
    """Decode a patch (hostile bytes) against the verified weights that serve, so many tensors at the same time. It must
    lead to weights with the digest that the trainer signed for this version.
    """
    steps = RankSteps(engine_weights, cancelled)
    # 1. The patch is for exactly the weights in memory: their digest was read back, so a patch for a sibling version
    # stops here.
    with steps.local():
        if engine_weights.digest is None:
            raise ServedWeightsError("the served weights are not verified; a patch needs a verified version")
        header = read_header(patch)
        if header.base != engine_weights.digest or header.result != digest:
            raise PatchError(
                "made for other weights than these, or not the patch of this version", f"version {version}"
            )
        staged = StagedVersion(version, engine_weights.digest, digest, dict(engine_weights.digests))
        shapes = engine_weights.described()
        frames = list(split_frames(patch, header, header.table.units(shapes)))
    steps.agree()
    # 2. Decode tensor by tensor, against what is read from the engine itself, and keep only the changed elements.
    changes: dict[str, list[ElementChange]] = {}

    def decode(item: tuple[Unit, memoryview]) -> None:
        unit, frame = item
        # A tensor is valid until the next one is read, so those that share a frame are copied; they are small.
        tensors = {row.name: steps.read(row.name) if len(unit) == 1 else steps.read(row.name).clone() for row in unit}
        pieces_of: dict[str, list[Changes]] = {}
        with steps.local():
            results = apply_unit(tensors, unit, frame, tensors, pieces_of)
            staged.digests |= {name: digest for name, (_, digest) in results.items()}
            for name, pieces in pieces_of.items():
                indices, values = map(np.concatenate, zip(*pieces, strict=True))
                changes[name] = element_changes(engine_weights.placements[name], indices, values)

    # The largest first, so that no thread begins one when the others have ended.
    changed = [(unit, frame) for unit, frame in frames if unit[-1].changed]
    changed.sort(key=lambda item: -unit_row(item[0]).elements)
    # Ranks read tensors together, one after the other.
    for_each(decode, changed, threads if engine_weights.is_alone else 1)
    staged.changes = [change for unit, _ in changed for row in unit for change in changes.get(row.name, ())]
    # 3. The digests of all tensors, changed or not, must be the signed ones together. Only then can it be committed.
    with steps.local():
        if weights_digest(staged.digests, shapes) != digest:
            raise PatchError("the patch does not lead to the weights that the trainer signed", f"version {version}")
    steps.agree()
    return staged


def stage_weights(
    engine_weights: ServedWeights, version: int, path: Path, digest: bytes, cancelled: Cancelled = lambda: False
) -> StagedVersion:
    """Check a whole checkpoint, a safetensors file that the node wrote; ServedWeightsError if it has other tensors than
    the model, or not the weights of this version.

    If verified weights serve and few elements differ, only those are staged, so that the commit can be undone.
    """
    # The staged digests come from the file alone; what the engine serves decides only how the change is written.
    steps = RankSteps(engine_weights, cancelled)
    staged = StagedVersion(version, engine_weights.digest, digest, {})
    tensors: dict[str, Tensor] = {}  # of the mapped file: in memory only while they are used
    with steps.local(), safe_open(path, framework="pt") as file:
        names = set(file.keys())
        if names != engine_weights.placements.keys():
            raise ServedWeightsError(
                f"{min(names ^ engine_weights.placements.keys())}: only in the weights or in the model"
            )
        for name in sorted(names):
            steps.check()
            tensor = tensors[name] = file.get_tensor(name)
            if tensor.dtype != torch.bfloat16 or tuple(tensor.shape) != engine_weights.placements[name].shape:
                raise ServedWeightsError(f"{name}: {tensor.dtype} {tuple(tensor.shape)} does not fit the model")
            staged.digests[name] = tensor_digest(tensor)
        if weights_digest(staged.digests, engine_weights.described()) != digest:
            raise ServedWeightsError(f"the weights in {path.name} are not those of version {version}")
    steps.agree()
    # From here on all ranks have the same tensors in the same order, and so read the same ones.
    is_dense = engine_weights.digest is None
    for name, tensor in tensors.items():
        if is_dense:
            break  # once one tensor is too dense, all are written whole, and the others need no comparison
        if staged.digests[name] == engine_weights.digests[name]:
            continue
        # Bits are compared, not numbers: 0.0 and -0.0 differ, and a NaN equals itself.
        bits = bits_of(tensor)
        indices = np.flatnonzero(bits_of(steps.read(name)) != bits)
        is_dense = indices.size * _DENSE > bits.size
        with steps.local():
            staged.changes += element_changes(engine_weights.placements[name], indices, bits[indices])
    steps.agree()
    # `base` of None says that the change fits any weights; it has no undo.
    if is_dense:
        staged.changes, staged.base, staged.tensors = [], None, tensors
    return staged
