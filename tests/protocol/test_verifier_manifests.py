"""The chain verifier accepts the manifests of a head in any order, and refuses those that do not continue the chain."""

from typing import Any

import pytest

from protocol.chain.verifier import Trust
from protocol.digest import content_digest
from protocol.errors import (
    ChainError,
    ForkError,
    ProtocolError,
    SignatureError,
)
from tests.protocol.signed_chain import NOW, Trainer, chain, verifier
from tests.support.builders import samples
from tests.support.builders.samples import MINER, RUN_ID


def test_a_new_node_follows_a_chain() -> None:
    node, trainer = verifier(), chain(4)
    node.accept_head(trainer.head(), NOW)
    assert [version for version, _ in node.missing_manifests()] == [0, 1, 2, 3]
    for version, digest in node.missing_manifests():
        assert content_digest(trainer.manifests[version].to_bytes()) == digest
        node.accept_manifest(version, trainer.data(version))
    assert node.missing_manifests() == []
    newest = content_digest(trainer.manifests[3].to_bytes())
    assert node.trust == Trust(run=RUN_ID, epoch=1, version=3, digest=newest, revision=0)
    assert list(node.manifests()) == trainer.manifests


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"previous": samples.digest("elsewhere")}, ForkError),
        ({"tensors": (("a", "BF16", (2, 3)), ("b", "F32", (1,)))}, ChainError),
        ({"epoch": 0}, ChainError),
        ({"epoch": 2}, ChainError),
        ({"first_window": 0}, ChainError),
        ({"run": samples.digest("other")}, ChainError),
        ({"version": 3}, ChainError),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (2, 1, 0)], ids=str)
def test_a_manifest_that_does_not_continue_the_chain_is_refused(
    change: dict[str, Any], error: type[ProtocolError], order: tuple[int, ...]
) -> None:
    """Such a manifest is refused in whatever order it arrives, though the head lists it and the trainer signed it."""
    trainer = chain(2)
    trainer.manifests.append(
        samples.manifest(2, content_digest(trainer.manifests[1].to_bytes())).model_copy(update=change)
    )
    node = verifier()
    node.accept_head(trainer.head(), NOW)
    with pytest.raises(error):
        for version in order:
            node.accept_manifest(version, trainer.data(version))
    assert node.trust is None
    assert len(list(node.manifests())) < 3


def test_a_manifest_that_the_head_does_not_list_is_refused() -> None:
    node = verifier()
    node.accept_head(chain(2).head(), NOW)
    with pytest.raises(ChainError, match="not the one that the head lists"):
        node.accept_manifest(1, chain(1).add(optimizer_step=99).data(1))
    with pytest.raises(ValueError, match="does not list version 2"):
        node.accept_manifest(2, chain(3).data(2))


def test_a_manifest_signed_by_another_key_is_refused() -> None:
    stranger = Trainer(MINER).add()
    node = verifier()
    node.accept_head(chain(1).head(), NOW)
    with pytest.raises(SignatureError):
        node.accept_manifest(0, stranger.data(0))


def test_another_genesis_is_refused() -> None:
    trainer = Trainer().add(weights=samples.digest("other weights"))
    node = verifier()
    node.accept_head(trainer.head(), NOW)
    with pytest.raises(ChainError, match="genesis"):
        node.accept_manifest(0, trainer.data(0))


def test_manifests_are_accepted_in_any_order() -> None:
    trainer, node = chain(4), verifier()
    node.accept_head(trainer.head(), NOW)
    for version in (2, 0, 3, 1):
        assert node.trust is None
        node.accept_manifest(version, trainer.data(version))
    assert node.trust is not None
    assert node.trust.version == 3
