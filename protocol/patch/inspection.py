"""What a patch spends its bits on, and how few would do (docs/spec/patch.md, section 7)."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from protocol.patch.container import Mode, TensorRow, read_header, split_frames
from protocol.patch.context_model import Model
from protocol.patch.sparse import Chunk, read_directory
from protocol.patch.values import bits_of, layout_of, ordered


def _entropy_of_counts(counts: np.ndarray) -> float:
    kept = counts[counts > 0].astype(np.float64)
    return float(-(kept * np.log2(kept / kept.sum())).sum()) if kept.size else 0.0


def bound_bits(old: torch.Tensor, new: torch.Tensor) -> float:
    """Empirical conditional entropy of an update, in bits for each changed element; 0.0 when nothing changed.

    H(changed | exponent of the old value) over all elements plus H(step | exponent of the old value) over the changed
    ones, with the tensor's own frequencies as probabilities, which no decoder is told: nothing that codes by exponent
    alone gets below it.
    """
    layout = layout_of(old.dtype)
    before, after = bits_of(old), bits_of(new)
    differs = before != after
    changed = int(differs.sum())
    if changed == 0:
        return 0.0
    shift = layout.mantissa if layout.is_float else 0
    exponents = (before >> before.dtype.type(shift)) & before.dtype.type(layout.exponents - 1)
    total = 0.0
    steps = ordered(after[differs], layout).astype(np.int64) - ordered(before[differs], layout).astype(np.int64)
    for exponent in range(layout.exponents):
        members = int((exponents == exponent).sum())
        own = steps[exponents[differs] == exponent]
        total += _entropy_of_counts(np.array([own.size, members - own.size]))
        total += _entropy_of_counts(np.unique(own, return_counts=True)[1])
    return total / changed


@dataclass(frozen=True, slots=True)
class FrameFacts:
    """One tensor of a patch.

    Attributes:
        density: share of the elements that change.
        bits_per_change: bits of the frame for each changed element.
        classes: classes of the model; 0 without one.
        listed: changes coded apart because they leave their class (all of them in the fast profile).
        sections: bytes of a sparse frame's data by section: "words", "raw"; 0 for other codecs.
    """

    row: TensorRow
    density: float
    bits_per_change: float
    classes: int
    listed: int
    sections: dict[str, int]


def frame_facts(patch: bytes) -> Iterator[FrameFacts]:
    """Facts of every tensor, from the table and the frames' directories; no weights are needed, nothing is decoded.

    Raises:
        MalformedError, LimitError, PatchError: a table or a directory that is broken.
    """
    header = read_header(patch)
    for row, frame in zip(header.rows, split_frames(patch, header), strict=True):
        model: Model | None = None
        chunks: list[Chunk] = []
        if row.mode == Mode.SPARSE:
            model, chunks = read_directory(frame, row.shape, row.changed, layout_of(row.dtype))
        yield FrameFacts(
            row,
            row.changed / max(1, row.elements),
            8 * row.size / row.changed if row.changed else 0.0,
            model.classes if model else 0,
            sum(chunk.counts[0] for chunk in chunks),
            {"words": sum(2 * chunk.words for chunk in chunks), "raw": sum(chunk.raw for chunk in chunks)},
        )
