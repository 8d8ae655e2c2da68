"""Statistics of a patch, and a lower bound on its size (docs/spec/patch.md, section 6)."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from protocol.patch.container import Mode, TensorRow, read_header, split_frames
from protocol.patch.context_model import Model
from protocol.patch.sparse import Chunk, read_directory
from protocol.patch.values import bits_of, layout_of, to_keys


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


@dataclass(frozen=True, slots=True)
class FrameFacts:
    """The statistics of one frame.

    Attributes:
        density: share of the changed elements, of all tensors of the frame.
        bits_per_change: bits of the frame per changed element; 0.0 if nothing changed.
        classes: number of classes of the model; 0 if the frame has no classes.
        sections: bytes of a sparse frame's sections "words" and "raw"; 0 in other modes.
    """

    row: TensorRow
    density: float
    bits_per_change: float
    classes: int
    sections: dict[str, int]


def frame_facts(patch: bytes) -> Iterator[FrameFacts]:
    """Yield the statistics of every tensor, from the table and the directories of the frames (hostile bytes); no change
    is decoded.
    """
    header = read_header(patch)
    joined: dict[str, int] = {}  # elements by the name of the tensor that has their frame
    for row, frame in zip(header.rows, split_frames(patch, header), strict=True):
        elements = row.elements + joined.pop(row.host or row.name, 0)
        if row.host:
            joined[row.host] = elements
        model: Model | None = None
        chunks: list[Chunk] = []
        # Only sparse frames have a model; the sizes of the others are in the table.
        if row.mode == Mode.SPARSE:
            shape = row.shape if elements == row.elements else (elements,)
            model, chunks = read_directory(frame, shape, row.changed, layout_of(row.dtype))
        yield FrameFacts(
            row,
            row.changed / max(1, elements),
            8 * row.size / row.changed if row.changed else 0.0,
            model.classes if model else 0,
            {"words": sum(2 * chunk.words for chunk in chunks), "raw": sum(chunk.raw for chunk in chunks)},
        )
