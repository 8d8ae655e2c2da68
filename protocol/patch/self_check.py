"""The trainer's check of its own patch before anybody follows it: applied once, and compared byte for byte.

A follower hashes what it decodes, because digests are all it has of the new weights. The trainer has the weights
themselves and their digests, so it compares the decoded elements with them and hashes nothing again: equal bytes have
the digests that the manifest will name.
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
    """The decoded elements of a changed row must be those of the new tensor, all of them and in order."""
    expected, end = bits_of(new[row.name]), 0
    for begin, piece in decode_frame(row, frame, bits_of(old[row.name])):
        if begin != end or not np.array_equal(piece, expected[begin : begin + piece.size]):
            raise PatchError("does not decode to the tensor that it was made from", row.name)
        end = begin + piece.size
    if end != expected.size:
        raise PatchError(f"decodes to {end} of {expected.size} elements", row.name)


def check_encoded(old: Weights, new: Weights, patch: bytes, *, base_digests: Digests, digests: Digests) -> None:
    """Check that followers who have the old weights come from this patch to the new ones.

    Args:
        base_digests: BLAKE3 of each old tensor.
        digests: BLAKE3 of each new tensor, which the caller computed from these very tensors.

    Raises:
        MalformedError, LimitError, PatchError: they would refuse it, or come to other weights.
    """
    header = read_header(patch, len(old))
    rows = check_fit(old, header.rows)
    if weights_digest(base_digests, old) != header.base:
        raise PatchError("made for other weights than these")
    for row, frame in zip(rows, split_frames(patch, header), strict=True):
        if row.mode == Mode.UNCHANGED:
            if digests[row.name] != base_digests[row.name]:
                raise PatchError("left unchanged, and the new tensor has another digest", row.name)
            continue
        check_tensor(row, digests[row.name])
        _check_elements(row, frame, old, new)
    check_result(new, digests, header)
