"""The chain verifier follows heads that advance, and refuses older, expired, forked and foreign ones."""

from collections.abc import Callable

import pytest

from protocol.chain.verifier import Trust
from protocol.errors import (
    ChainError,
    ExpiredError,
    ForkError,
    MalformedError,
    ProtocolError,
    RollbackError,
    SignatureError,
)
from tests.protocol.signed_chain import NOW, Trainer, chain, follow, verifier
from tests.support.builders import samples
from tests.support.builders.samples import MINER


def test_a_node_follows_new_versions() -> None:
    trainer = chain(3)
    node = follow(verifier(), trainer)
    follow(node, trainer.add().add())
    assert node.trust is not None
    assert node.trust.version == 4


def test_an_older_version_is_refused() -> None:
    trainer = chain(3)
    node = follow(verifier(), trainer)
    with pytest.raises(RollbackError):
        node.accept_head(trainer.head(1), NOW)
    assert node.head is not None
    assert node.head.version == 2


def test_an_older_epoch_is_refused_even_with_a_newer_version() -> None:
    trainer = chain(3)
    node = follow(verifier(), trainer, trainer.head(epoch=5))
    with pytest.raises(RollbackError):
        node.accept_head(trainer.add().head(epoch=4), NOW)


def test_an_older_version_is_refused_even_with_a_newer_epoch() -> None:
    trainer = chain(3)
    node = follow(verifier(), trainer)
    with pytest.raises(RollbackError):
        node.accept_head(trainer.head(1, epoch=9), NOW)


def test_an_epoch_holds_from_the_first_head_that_has_it() -> None:
    """After a takeover without a new version, heads of the old epoch are refused."""
    trainer = chain(3)
    node = follow(verifier(), trainer)
    node.accept_head(trainer.head(epoch=2), NOW)
    assert node.trust is not None
    assert node.trust.epoch == 2
    with pytest.raises(RollbackError):
        node.accept_head(trainer.head(epoch=1), NOW)


def test_a_restarted_node_continues_from_its_trust() -> None:
    trainer = chain(4)
    trust = follow(verifier(), trainer).trust
    with pytest.raises(RollbackError):
        verifier(trust).accept_head(trainer.head(2), NOW)
    assert follow(verifier(trust), trainer.add()).trust != trust


def test_a_node_refuses_heads_older_than_its_current_head() -> None:
    """This holds even while manifests of the newer head are missing, when the trust is older than both heads."""
    trainer = chain(8)
    node = follow(verifier(), trainer, trainer.head(2))
    node.accept_head(trainer.head(7), NOW)
    node.accept_manifest(7, trainer.data(7))
    with pytest.raises(RollbackError):
        node.accept_head(trainer.head(5), NOW)
    assert node.trust is not None
    assert node.trust.version == 2


def test_another_manifest_for_a_known_version_is_a_fork() -> None:
    other_trainer = chain(2).add(optimizer_step=99).add()
    node = follow(verifier(), chain(3))
    with pytest.raises(ForkError):
        node.accept_head(other_trainer.head(), NOW)
    with pytest.raises(ForkError):
        verifier(node.trust).accept_head(other_trainer.head(), NOW)


def test_two_heads_with_different_manifests_for_one_version_are_a_fork() -> None:
    node = verifier()
    node.accept_head(chain(3).head(), NOW)
    with pytest.raises(ForkError):
        node.accept_head(chain(2).add(optimizer_step=99).head(), NOW)


def test_a_renewed_head_is_accepted() -> None:
    trainer = chain(3)
    node = follow(verifier(), trainer)
    node.accept_head(trainer.head(expires_ms=4_500_000), NOW)
    assert node.missing_manifests() == []


def test_expired_heads_are_refused() -> None:
    trainer = chain(1)
    verifier().accept_head(trainer.head(expires_ms=1_000_001), NOW)
    for expires_ms in (0, 999_999, 1_000_000):
        with pytest.raises(ExpiredError):
            verifier().accept_head(trainer.head(expires_ms=expires_ms), NOW)


def test_a_refused_head_changes_nothing() -> None:
    trainer = chain(3)
    node = follow(verifier(), trainer)
    before = (node.head, node.trust, list(node.manifests()))
    for bad in (trainer.head(1), chain(2).add(optimizer_step=99).head(), trainer.head(expires_ms=0), b"junk"):
        with pytest.raises(ProtocolError):
            node.accept_head(bad, NOW)
    assert (node.head, node.trust, list(node.manifests())) == before


@pytest.mark.parametrize(
    ("head", "error"),
    [
        (lambda: chain(1).head(run=samples.digest("other")), ChainError),
        (lambda: Trainer(MINER).add().head(), SignatureError),
        (lambda: chain(1).data(0), MalformedError),
        (lambda: chain(1).head()[:-1], MalformedError),
    ],
    ids=["another run", "a stranger's", "a manifest", "cut off"],
)
def test_invalid_heads_are_refused(head: Callable[[], bytes], error: type[ProtocolError]) -> None:
    with pytest.raises(error):
        verifier().accept_head(head(), NOW)


def test_trust_of_another_run_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="another run"):
        verifier(Trust(run=samples.digest("other"), epoch=0, version=0, digest=samples.digest("x"), revision=0))
