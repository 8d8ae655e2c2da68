"""A version's patch on its way from the snapshot to the store: each tensor is hashed once, by whoever comes first."""

from collections.abc import Iterator
from typing import Any

import blake3 as blake3_module
import pytest
import torch

from protocol import digest
from protocol.digest import tensor_digest
from protocol.errors import PatchError
from protocol.patch import LinkConditions, applying, codec
from roles.trainer.publish.version_build import check_patch, digest_snapshot, encode_patch

TENSOR_BYTES = 64 * 64 * 2


class CountingHasher:
    """BLAKE3 that notes the size of everything that is hashed."""

    AUTO = blake3_module.blake3.AUTO
    sizes: list[int]

    def __init__(self, data: Any = b"", **options: Any) -> None:
        self._hasher = blake3_module.blake3(data, **options)
        self._size = len(memoryview(data).cast("B"))

    def update(self, data: Any) -> "CountingHasher":
        self._hasher.update(data)
        self._size += len(memoryview(data).cast("B"))
        return self

    def digest(self) -> bytes:
        self.sizes.append(self._size)
        return self._hasher.digest()


@pytest.fixture
def hashed_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes under each digest that is computed during a test."""
    CountingHasher.sizes = []
    for module in (digest, codec, applying):
        monkeypatch.setattr(module, "blake3", CountingHasher)
    yield CountingHasher.sizes


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(64, 64, generator=generator).bfloat16() for name in "abc"}


@pytest.mark.parametrize("profile", ["compact", "fast"])
def test_every_tensor_is_hashed_once_on_its_way_to_a_patch(hashed_sizes: list[int], profile: str) -> None:
    old = weights(0)
    before = digest_snapshot(0, old, None)
    new = old | {name: tensor * 1.01 for name, tensor in old.items() if name != "b"}
    hashed_sizes.clear()
    after = digest_snapshot(1, new, before)
    encoded = encode_patch(after, before, profile, LinkConditions())
    assert check_patch(encoded.patch, after, before) > 0
    assert sum(size == TENSOR_BYTES for size in hashed_sizes) == 3
    assert max(hashed_sizes) == TENSOR_BYTES  # the others are tables of digests
    assert sum(hashed_sizes) < 3.5 * TENSOR_BYTES
    assert encoded.digests == after.digests == {name: tensor_digest(tensor) for name, tensor in new.items()}


def test_a_patch_to_other_weights_is_refused() -> None:
    before, after, other = (
        digest_snapshot(0, weights(0), None),
        digest_snapshot(1, weights(1), None),
        digest_snapshot(1, weights(2), None),
    )
    encoded = encode_patch(other, before, "compact", LinkConditions())
    with pytest.raises(PatchError):
        check_patch(encoded.patch, after, before)
