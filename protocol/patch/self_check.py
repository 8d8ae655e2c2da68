"""The trainer's check of its own patch before it publishes it: it decodes the patch and compares the elements.

A follower hashes the decoded tensors, because it has only digests of the new weights. The trainer has the new weights
and their digests, so it compares the decoded elements with them and hashes nothing: equal bytes have the digests that
the manifest will contain.
"""

import numpy as np

from protocol.digest import Weights, weights_digest
from protocol.errors import PatchError
from protocol.patch.applying import check_fit, check_result, check_tensor
from protocol.patch.codec import Digests
from protocol.patch.container import Mode, TensorRow, read_header, split_frames
from protocol.patch.frames import decode_frame
from protocol.patch.values import bits_of


def _check_elements(row: TensorRow, frame: memoryview, old: Weights, new: Weights) -> None:
    """Check that the decoded elements of a changed row are those of the new tensor, complete and in order."""
    new_elements, end = bits_of(new[row.name]), 0
    for begin, piece in decode_frame(row, frame, bits_of(old[row.name])):
        if begin != end or not np.array_equal(piece, new_elements[begin : begin + piece.size]):
            raise PatchError("does not decode to the tensor that it was made from", row.name)
        end = begin + piece.size
    if end != new_elements.size:
        raise PatchError(f"decodes to {end} of {new_elements.size} elements", row.name)


def check_encoded(old: Weights, new: Weights, patch: bytes, *, base_digests: Digests, digests: Digests) -> None:
    """Check that a follower that applies this patch to the old weights gets the new ones.

    Args:
        base_digests: BLAKE3 of each old tensor.
        digests: BLAKE3 of each new tensor, computed by the caller from these tensors.

    Raises:
        MalformedError, LimitError, PatchError: a follower would refuse the patch, or get other weights.
    """
    header = read_header(patch, len(old))
    rows = check_fit(old, header.rows)
    if weights_digest(base_digests, old) != header.base:
        raise PatchError("made for other weights than these")
    for row, frame in zip(rows, split_frames(patch, header), strict=True):
        if row.mode == Mode.UNCHANGED:
            if digests[row.name] != base_digests[row.name]:
                raise PatchError("unchanged in the patch, but the new tensor has another digest", row.name)
            continue
        check_tensor(row, digests[row.name])
        _check_elements(row, frame, old, new)
    check_result(new, digests, header)
