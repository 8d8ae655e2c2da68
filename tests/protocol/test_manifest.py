"""The checks that a head or a manifest passes by itself."""

from typing import Any

import pytest
from pydantic import ValidationError

from protocol import limits
from protocol.chain.manifest import Manifest, tensor_table
from protocol.errors import MalformedError
from tests.support.builders import samples


def test_the_longest_head_can_be_written() -> None:
    samples.head(manifests=(samples.digest("m"),) * limits.MAX_CHAIN, anchors=tuple(range(limits.MAX_CHAIN))).to_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"anchors": ()},
        {"anchors": (1, 0)},
        {"anchors": (0, 0)},
        {"anchors": (2,), "oldest_patch": 2},
        {"base": 1},
        {"oldest_patch": 3},
        {"anchors": (1,), "oldest_patch": 0},
        {"manifests": ()},
        {"epoch": -1},
    ],
)
def test_invalid_heads(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        samples.head(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"previous": samples.digest("before")},
        {"anchor": ()},
        {"patch": samples.manifest(1, samples.digest("m")).patch},
        {"tensors": ()},
        {"tensors": (("b", "F32", ()), ("a", "F32", ()))},
        {"tensors": (("a", "F32", ()), ("a", "F32", ()))},
        {"tensors": (("a", "F64", ()),)},
        {"tensors": (("a", "F32", (-1,)),)},
        {"tensors": (("a", "F32", (1 << 30, 1 << 30)),)},
        {"tensors": (("a", "F32", (1,) * 9),)},
        {"tensors": (("é" * 300, "F32", ()),)},
    ],
)
def test_invalid_manifests(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        samples.manifest(**changes)


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
