"""The trainer's check of its own patch before it publishes it: it decodes the patch and compares the elements.

A follower hashes the decoded tensors, because it has only digests of the new weights. The trainer has the new weights
and their digests, so it compares the decoded elements with them and hashes nothing: equal bytes have the digests that
the manifest will contain.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from protocol.digest import Weights
from protocol.errors import PatchError
from protocol.patch.applying import check_fit, check_tensor
from protocol.patch.codec import EncodedTensor
from protocol.patch.container import Mode, TensorRow, read_header, split_frames, unit_row, units_of
from protocol.patch.frames import decode_frame
from protocol.patch.values import Bits, bits_of


def _check_elements(rows: Sequence[TensorRow], frame: memoryview, old: Weights, new: Weights) -> None:
    """Check that the decoded elements of a frame are those of its new tensors, complete and in order."""
    # The pieces must join without a gap, so that no element is left unseen.
    before, new_elements = (_side_by_side([bits_of(weights[row.name]) for row in rows]) for weights in (old, new))
    row, end = unit_row(rows), 0
    for begin, piece, _ in decode_frame(row, frame, before):
        if begin != end or not np.array_equal(piece, new_elements[begin : begin + piece.size]):
            raise PatchError("does not decode to the tensor that it was made from", row.name)
        end = begin + piece.size
    if end != new_elements.size:
        raise PatchError(f"decodes to {end} of {new_elements.size} elements", row.name)


def _side_by_side(tensors: list[Bits]) -> Bits:
    return tensors[0] if len(tensors) == 1 else np.concatenate(tensors)


def check_frames(old: Weights, new: Weights, encoded: Mapping[str, EncodedTensor]) -> None:
    """Check that a follower that decodes the frames of some tensors gets the new ones.

    Args:
        old, new: tensors, with the same names; encoded: the frames of at least these.

    Raises:
        MalformedError, LimitError, PatchError: a follower would refuse a frame, or get another tensor.
    """
    for name, rows in units_of(check_fit(old, (encoded[name].row for name in sorted(new)))).items():
        item, row = encoded[name], rows[-1]
        if row.name != name:
            raise PatchError("joined to a tensor that was not encoded with it", row.name)
        if row.mode == Mode.UNCHANGED:
            if item.after != item.before:
                raise PatchError("unchanged in the patch, but the new tensor has another digest", name)
            continue
        check_tensor(row, item.after)
        _check_elements(rows, item.frame, old, new)


def check_container(patch: bytes, encoded: Mapping[str, EncodedTensor], base: bytes, result: bytes) -> None:
    """Check that a patch consists of frames that `check_frames` has checked.

    Args:
        encoded: all tensors by name.
        base, result: digests of the old and of the new weights.

    Raises:
        MalformedError, LimitError, PatchError: a follower would refuse the patch.
    """
    # The frames were checked before they were joined, so it suffices that these are their bytes, under the same rows.
    header = read_header(patch, len(encoded))
    if (header.base, header.result) != (base, result):
        raise PatchError("made for other weights than these")
    for row, frame in zip(header.rows, split_frames(patch, header), strict=True):
        item = encoded.get(row.name)
        if item is None or item.row != row or bytes(frame) != bytes(item.frame):
            raise PatchError("a frame that is not the one that was encoded", row.name)
