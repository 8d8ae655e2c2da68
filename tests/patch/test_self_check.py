"""The trainer's check of its own patch: every patch that does not give the new weights is refused."""

from collections.abc import Callable

import pytest

from protocol import patch
from protocol.digest import Weights, tensor_digest, weights_digest
from protocol.errors import PatchError, ProtocolError
from protocol.patch.container import CHECK_BYTES, Mode, TensorRow, read_header, split_frames, write_container
from tests.patch.weights import rounded_update


def digests_of(weights: Weights) -> dict[str, bytes]:
    return {name: tensor_digest(tensor) for name, tensor in weights.items()}


BEFORE, AFTER = rounded_update(64, 64, 1.0, seed=5)
OLD, NEW = {"a": BEFORE, "b": BEFORE.clone()}, {"a": AFTER, "b": BEFORE.clone()}
"""One tensor changes, and one does not."""

OTHER = NEW | {"a": AFTER.flip(0)}


def check(data: bytes, old: Weights = OLD, new: Weights = NEW) -> None:
    """Check a patch as the publisher does, with the frames in the patch as those that were encoded."""
    before, after = digests_of(old), digests_of(new)
    header = read_header(data)
    encoded = {
        row.name: patch.EncodedTensor(row, frame, before[row.name], after[row.name])
        for unit, frame in split_frames(data, header, header.table.units(old))
        for row in unit
    }
    patch.check_frames(old, new, encoded)
    patch.check_container(data, encoded, weights_digest(before, old), weights_digest(after, new))


@pytest.mark.parametrize("profile", ["compact", "fast"])
def test_a_correct_patch_passes(profile):
    check(patch.encode(OLD, NEW, profile=profile))
    check(patch.encode(OLD, OLD, profile=profile), OLD, OLD)


def test_patches_between_other_weights_are_refused():
    for before, after in ((OLD, OTHER), (OTHER, NEW), (NEW, OLD), (OLD, OLD), (OLD, {**NEW, "b": NEW["a"]})):
        with pytest.raises(PatchError):
            check(patch.encode(before, after))


def test_a_frame_of_other_weights_is_refused_though_its_digests_are_those_of_the_new_weights():
    """An encoder with a fault might write digests of the new weights, but frames of other weights."""
    wrong = patch.encode(OLD, OTHER)
    header, digests = read_header(wrong), digests_of(NEW)
    rows = [
        row
        if row.mode == Mode.UNCHANGED
        else TensorRow(row.name, row.dtype, row.shape, row.mode, row.changed, row.size, digests[row.name][:CHECK_BYTES])
        for (row,) in header.table.units(OLD)
    ]
    frames = [frame for _, frame in split_frames(wrong, header, header.table.units(OLD))]
    data = write_container(header.profile, header.base, weights_digest(digests, NEW), rows, frames)
    with pytest.raises(PatchError, match="does not decode to the tensor that it was made from"):
        check(data)


def test_a_missing_change_is_refused():
    header = read_header(patch.encode(OLD, NEW))
    rows = [TensorRow(row.name, row.dtype, row.shape, Mode.UNCHANGED, 0, 0, b"") for (row,) in header.table.units(OLD)]
    data = write_container(header.profile, header.base, header.result, rows, [])
    with pytest.raises(PatchError, match="another digest"):
        check(data)


def test_the_check_accepts_exactly_the_patches_that_a_follower_accepts():
    data, digests = patch.encode(OLD, NEW), digests_of(OLD)

    def is_accepted(read: Callable[[bytes], object], patch_bytes: bytes) -> bool:
        try:
            read(patch_bytes)
        except ProtocolError:
            return False
        return True

    verdicts = []
    for place in range(len(data)):
        mutant = bytearray(data)
        mutant[place] ^= 1
        applies = is_accepted(lambda data: patch.apply_with_digests(OLD, data, digests=digests), bytes(mutant))
        assert is_accepted(check, bytes(mutant)) == applies, f"byte {place}"
        verdicts.append(applies)
    assert not all(verdicts)


def test_a_container_of_other_frames_is_refused():
    encoder = patch.PatchEncoder("compact")
    encoder.add(OLD, NEW)
    digests = weights_digest(digests_of(OLD), OLD), weights_digest(digests_of(NEW), NEW)
    patch.check_container(encoder.finish(), encoder.tensors, *digests)
    with pytest.raises(PatchError):
        patch.check_container(patch.encode(OLD, NEW, profile="fast"), encoder.tensors, *digests)
    with pytest.raises(PatchError, match="made for other weights"):
        patch.check_container(encoder.finish(), encoder.tensors, *reversed(digests))


def test_digests_of_other_tensors_are_a_value_error():
    digests = digests_of(OLD)
    with pytest.raises(ValueError, match="a digest of another tensor"):
        patch.encode(OLD, NEW, base_digests=digests, digests=digests)
    with pytest.raises(ValueError, match="a digest of another tensor"):
        patch.encode(OLD, NEW, base_digests=digests, digests=digests_of(NEW) | {"b": bytes(32)})
