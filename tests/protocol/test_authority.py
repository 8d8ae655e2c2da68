"""Revisions of the authority: who must sign them, their numbers and links."""

from typing import Any

import pytest

from protocol.errors import ChainError, ForkError, GapError, ProtocolError, RollbackError, SignatureError
from protocol.identity.authority import Authority, Revision, Revisions
from protocol.identity.signing import Envelope, SigningKey, sign
from tests.support.builders import samples
from tests.support.builders.samples import MINER, RUN_ID, TRAINER, VALIDATOR, authority, revision

KEYS = (TRAINER.public, VALIDATOR.public)
A, B, C, D = (samples.key(f"root {name}") for name in "abcd")
THREE = {"roots": (A.public, B.public, C.public), "root_threshold": 2}


def of(*keys: SigningKey, **changes: Any) -> Authority:
    """Return an authority in which two roots must sign; its roots are `keys`, or A, B and C."""
    roots = {"roots": tuple(key.public for key in keys), "root_threshold": 2} if keys else THREE
    return authority(**(roots | changes))


def revisions_of(*revisions: Revision) -> Revisions:
    """Return the revisions of a node that has adopted some, each signed by A and B."""
    node = Revisions(RUN_ID, of())
    for item in revisions:
        node.adopt(node.check(item.number, sign(item, A, B)))
    return node


def after(node: Revisions, **changes: Any) -> Revision:
    return revision(node.number + 1, node.digest, **({"authority": of()} | changes))


@pytest.mark.parametrize("role", ["roots", "trainers", "validators"])
@pytest.mark.parametrize("key", [bytes(32), b"\xff" * 32])
def test_unsound_keys_are_refused(role: str, key: bytes) -> None:
    authority().check_keys()
    with pytest.raises(SignatureError):
        authority(**{role: (key,)}).check_keys()
    node = revisions_of()
    with pytest.raises(SignatureError):
        node.check(1, sign(after(node, authority=of(**({role: (key,)} | {"root_threshold": 1}))), A, B))


def test_any_two_of_three_roots_replace_the_authority() -> None:
    for signers in ((A, B), (B, C), (C, A), (A, B, C)):
        node = revisions_of()
        node.adopt(node.check(1, sign(after(node, authority=of(trainers=(MINER.public,))), *signers)))
        assert (node.number, node.current.trainers) == (1, (MINER.public,))


@pytest.mark.parametrize("signers", [(A,), (TRAINER, VALIDATOR), (A, TRAINER), (A, B, TRAINER), (D, TRAINER)], ids=str)
def test_a_revision_without_enough_roots_or_with_another_signer_is_refused(signers: tuple[SigningKey, ...]) -> None:
    node = revisions_of()
    with pytest.raises(SignatureError):
        node.check(1, sign(after(node), *signers))
    assert node.number == 0


def test_a_revision_with_one_invalid_signature_is_refused() -> None:
    node = revisions_of()
    envelope = Envelope.from_bytes(sign(after(node), A, B, C))
    last = envelope.signatures[-1].model_copy(update={"value": bytes(64)})
    with pytest.raises(SignatureError):
        node.check(1, envelope.model_copy(update={"signatures": (*envelope.signatures[:-1], last)}).to_bytes())


def test_roots_rotate_with_the_signatures_of_both_sides() -> None:
    rotated = of(B, C, D)
    for signers, holds in (((A, B), False), ((B, C), True), ((C, D), False), ((A, B, C), True), ((A, B, D), True)):
        node = revisions_of()
        data = sign(after(node, authority=rotated), *signers)
        if holds:
            node.adopt(node.check(1, data))
            assert node.current.roots == rotated.roots
        else:
            with pytest.raises(SignatureError):
                node.check(1, data)
    node.adopt(node.check(2, sign(after(node, authority=rotated), C, D)))
    with pytest.raises(SignatureError):
        node.check(3, sign(after(node, authority=rotated), A, B))  # A was a root once


def test_a_lower_threshold_needs_as_many_signatures_as_before() -> None:
    node = revisions_of()
    weaker = after(node, authority=of(root_threshold=1))
    with pytest.raises(SignatureError):
        node.check(1, sign(weaker, A))
    node.adopt(node.check(1, sign(weaker, A, B)))
    node.adopt(node.check(2, sign(after(node), A, B)))


def test_numbers_and_links() -> None:
    first = after(revisions_of(), note="one")
    second = after(revisions_of(first), note="two")
    node = revisions_of(first)
    with pytest.raises(RollbackError):
        node.check(2, sign(first, A, B))
    with pytest.raises(GapError):
        revisions_of().check(1, sign(second, A, B))
    with pytest.raises(ForkError):
        node.check(2, sign(second.model_copy(update={"previous": RUN_ID}), A, B))
    with pytest.raises(ChainError):
        node.check(2, sign(second.model_copy(update={"run": samples.digest("other")}), A, B))
    with pytest.raises(ValueError, match="higher than the next one, 2"):
        node.check(3, sign(second, A, B))
    with pytest.raises(ValueError, match="does not follow"):
        node.adopt(node.check(1, sign(first, A, B)))


def test_bytes_that_are_no_revision_are_refused() -> None:
    node = revisions_of()
    for rubbish in (b"", b"\xc1", bytes(10_000_000), sign(samples.head(), A, B), sign(after(node), A, B)[:-1]):
        with pytest.raises(ProtocolError):
            node.check(1, rubbish)
