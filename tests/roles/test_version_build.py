"""A version's patch on its way from the snapshot to the store: each tensor is hashed once, by whoever comes first."""

from collections.abc import Iterator
from typing import Any

import blake3 as blake3_module
import pytest
import torch

from protocol import digest, patch
from protocol.digest import digest_weights, tensor_digest
from protocol.errors import PatchError
from protocol.patch import applying, codec
from roles.trainer.publish.version_build import VersionBuild
from tests.support.builders.chains import version_weights

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
    before = version_weights(0, old)
    new = old | {name: tensor * 1.01 for name, tensor in old.items() if name != "b"}
    hashed_sizes.clear()
    build = VersionBuild(1, before, profile)
    for name in "abc":  # each in a file of its own
        build.add({name: new[name]})
        build.encode({name: new[name]}, {name: old[name]})
        build.check({name: new[name]}, {name: old[name]})
    data, changed = build.patch()
    assert changed == patch.summary(data).changed > 0
    assert sum(size == TENSOR_BYTES for size in hashed_sizes) == 3
    assert max(hashed_sizes) == TENSOR_BYTES  # the others are tables of digests
    assert sum(hashed_sizes) < 3.5 * TENSOR_BYTES
    after = build.weights()
    assert after.digests == {name: tensor_digest(tensor) for name, tensor in new.items()}
    assert (after.digest, after.shards, after.nbytes) == (digest_weights(new), 3, 3 * TENSOR_BYTES)
    assert data == patch.encode(old, new, profile=profile)


def test_a_fault_of_the_codec_is_found_before_the_patch_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, other = (weights(seed) for seed in range(3))
    build = VersionBuild(1, version_weights(0, old))
    build.add(new)
    build.encode(new, old)
    with pytest.raises(PatchError):
        build.check(other, old)
    wrong_patch = patch.encode(old, other)
    monkeypatch.setattr(codec, "write_container", lambda *parts: wrong_patch)
    with pytest.raises(PatchError):
        build.patch()
