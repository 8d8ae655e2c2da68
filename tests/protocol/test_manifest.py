"""The checks that a head or a manifest passes by itself."""

from typing import Any

import pytest
from pydantic import ValidationError

from protocol import limits
from protocol.chain.manifest import Manifest, PatchRef, tensor_table
from protocol.errors import MalformedError
from protocol.objects import ObjectRef
from tests.support.builders import samples


def test_the_longest_head_can_be_written() -> None:
    samples.head(manifests=(samples.digest("m"),) * limits.MAX_CHAIN, anchors=tuple(range(limits.MAX_CHAIN))).to_bytes()


@pytest.mark.parametrize("changes", [{"previous": b""}, {"previous": b"short"}, {"patch": None}])
def test_invalid_later_manifests(changes: dict[str, Any]) -> None:
    fields = samples.manifest(1, samples.digest("manifest 0")).model_dump()
    with pytest.raises(ValidationError):
        Manifest(**(fields | changes))


def test_check_table() -> None:
    weights = samples.weights()
    manifest = samples.manifest(tensors=tensor_table(weights))
    manifest.check_table(weights)
    assert manifest.elements == 24 + 6 + 0 + 1 + 5 + 2
    with pytest.raises(MalformedError):
        manifest.check_table({**weights, "bias": weights["bias"][:5]})


# A manifest cannot refer to objects larger than its tensors need, because readers download and store their sizes


WEIGHTS = 6 * 2 + 4  # bytes of the tensors of samples.TABLE
PATCH = 2 * WEIGHTS + limits.MAX_PATCH_HEADER_BYTES
HEADER = limits.MAX_SAFETENSORS_HEADER_BYTES


def patch(*sizes: int) -> dict[str, Any]:
    refs = (ObjectRef(digest=samples.digest(f"part {place}"), size=size) for place, size in enumerate(sizes))
    return {"patch": PatchRef(parts=tuple(refs), changed=1)}


def anchor(*sizes: int) -> dict[str, Any]:
    shards = (ObjectRef(digest=samples.digest(f"shard {place}"), size=size) for place, size in enumerate(sizes))
    return {"anchor": tuple(shards)}


@pytest.mark.parametrize(
    "changes",
    [
        patch(PATCH),
        patch(0, PATCH - 1, 1),
        anchor(WEIGHTS + HEADER),
        anchor(WEIGHTS + 2 * HEADER, 0),
        anchor(HEADER, WEIGHTS, 2 * HEADER),
        patch(PATCH) | anchor(WEIGHTS + HEADER),
    ],
)
def test_objects_up_to_the_size_of_their_tensors_are_accepted(changes: dict[str, Any]) -> None:
    manifest = samples.manifest(1, samples.digest("manifest 0"), **changes)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


@pytest.mark.parametrize(
    "changes",
    [
        patch(PATCH + 1),
        patch(PATCH, 1),
        patch(limits.MAX_PATCH_BYTES),
        anchor(WEIGHTS + HEADER + 1),
        anchor(WEIGHTS + 2 * HEADER, 1),
        anchor(limits.MAX_SHARD_BYTES),
        anchor(*(HEADER for _ in range(8)), WEIGHTS + HEADER + 1),
        patch(PATCH + 1) | anchor(WEIGHTS),
        patch(1) | anchor(WEIGHTS + HEADER + 1),
    ],
)
def test_objects_larger_than_their_tensors_are_refused(changes: dict[str, Any]) -> None:
    honest = samples.manifest(1, samples.digest("manifest 0"))
    with pytest.raises(ValidationError, match="larger than its tensors"):
        Manifest(**(dict(honest) | changes))
    with pytest.raises(MalformedError, match="larger than its tensors"):
        Manifest.from_bytes(honest.model_copy(update=changes).to_bytes())


def test_a_first_anchor_larger_than_its_tensors_is_refused() -> None:
    with pytest.raises(ValidationError, match="the anchor is larger than its tensors"):
        samples.manifest(**anchor(WEIGHTS + HEADER + 1))
