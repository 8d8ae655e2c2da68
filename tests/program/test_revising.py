"""Drafts of revisions: signed one key at a time, published when enough have; and what miners show to be admitted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grailnode.node import admission_proof
from grailnode.run import authority_drafts, key_files
from grailnode.run.authority_drafts import RevisionError, propose, read_draft
from grailnode.run.key_files import KeyFileError
from protocol.errors import SignatureError
from protocol.identity.admission import Invite
from protocol.identity.authority import Authority, Revisions
from protocol.identity.participant import Announcement
from protocol.identity.signing import sign
from roles.participants import find_participants
from tests.support.attacks.target import Target, attack
from tests.support.builders import samples
from tests.support.builders.chains import MINER as TARGET_MINER
from tests.support.builders.samples import MINER, RUN_ID, TRAINER, VALIDATOR

ROOTS = tuple(samples.key(f"root {number}") for number in range(3))
OTHER = samples.key("other")


def founding(**changes: Any) -> Authority:
    roots = {"roots": tuple(root.public for root in ROOTS), "root_threshold": 2}
    return samples.authority(**(roots | changes))


def test_a_draft_goes_from_key_to_key_and_is_published_when_enough_have_signed(tmp_path: Path):
    known = Revisions(RUN_ID, founding())
    draft = propose(known, "another trainer", **authority_drafts.replaced(known.current, TRAINER.public, OTHER.public))
    path = tmp_path / "revision-1.draft"
    assert authority_drafts.outstanding(draft, known) == "0 of 2 root keys have signed"
    for root in (ROOTS[2], ROOTS[0], ROOTS[0]):
        path.write_bytes(draft.signed_by(root).to_bytes())
        draft = read_draft(path)
    assert len(draft.signatures) == 2
    assert authority_drafts.outstanding(draft, known) == ""
    known.adopt(known.check(1, draft.envelope()))
    assert known.current.trainers == (OTHER.public,)
    assert known.current.revoked == (TRAINER.public,)


def test_the_signature_of_a_stranger_does_not_spoil_a_draft():
    known = Revisions(RUN_ID, founding())
    draft = propose(known, "").signed_by(OTHER).signed_by(ROOTS[0]).signed_by(ROOTS[2])
    with pytest.raises(SignatureError, match="no root"):
        known.check(1, draft.envelope())
    kept, foreign = authority_drafts.without_strangers(draft, set(known.current.roots))
    assert foreign == [OTHER.public]
    known.adopt(known.check(1, kept.envelope()))


def test_new_roots_must_sign_too():
    known = Revisions(RUN_ID, founding())
    draft = propose(known, "", **authority_drafts.replaced(known.current, ROOTS[0].public, OTHER.public))
    draft = draft.signed_by(ROOTS[0]).signed_by(ROOTS[1])
    assert authority_drafts.outstanding(draft, known) == "1 of 2 new root keys have signed"
    with pytest.raises(SignatureError):
        known.check(1, draft.envelope())
    draft = draft.signed_by(OTHER)
    assert authority_drafts.outstanding(draft, known) == ""
    known.adopt(known.check(1, draft.envelope()))


def test_keys_at_hand_sign_at_once(tmp_path: Path):
    for number in range(2):
        key_files.create(tmp_path / f"root-{number}.key", samples.digest(f"key of root {number}"))
    key_files.create(tmp_path / "miner-1.key")
    known = Revisions(RUN_ID, founding())
    draft = authority_drafts.sign_at_hand(propose(known, ""), tmp_path, known.current.roots)
    assert {signature.key for signature in draft.signatures} == {ROOTS[0].public, ROOTS[1].public}


def test_revoking_takes_every_role():
    inviting = samples.admission(policy="invite", inviters=(OTHER.public,), allowed=(OTHER.public,))
    authority = founding(validators=(VALIDATOR.public, OTHER.public), quorum=2, admission=inviting)
    after = propose(
        Revisions(RUN_ID, authority), "", **authority_drafts.revoked(authority, OTHER.public)
    ).revision.authority
    assert (after.validators, after.quorum, after.revoked) == ((VALIDATOR.public,), 1, (OTHER.public,))
    assert after.admission.inviters == after.admission.allowed == ()


def test_a_role_is_granted_beside_those_that_have_it():
    authority = founding()
    after = propose(Revisions(RUN_ID, authority), "", **authority_drafts.granted(authority, OTHER.public, "validator"))
    assert after.revision.authority.validators == (*authority.validators, OTHER.public)
    assert after.revision.authority.quorum == authority.quorum
    after = propose(Revisions(RUN_ID, authority), "", **authority_drafts.granted(authority, OTHER.public, "inviter"))
    assert after.revision.authority.admission.inviters == (OTHER.public,)


def test_what_nobody_can_ask_for():
    authority = founding()
    with pytest.raises(RevisionError, match="only one of the trainers; name a successor with `grailnode keys rotate`"):
        authority_drafts.revoked(authority, TRAINER.public)
    with pytest.raises(RevisionError, match="has no role"):
        authority_drafts.replaced(authority, MINER.public, OTHER.public)
    with pytest.raises(RevisionError, match="no such authority"):
        propose(Revisions(RUN_ID, authority), "", quorum=5)
    with pytest.raises(RevisionError, match="is of the validators already"):
        authority_drafts.granted(authority, VALIDATOR.public, "validator")
    with pytest.raises(RevisionError, match="revoked in this run for good"):
        authority_drafts.granted(founding(revoked=(OTHER.public,)), OTHER.public, "validator")


@pytest.mark.parametrize("rubbish", [b"", b"\xc1", b"\x80", samples.revision().to_bytes()])
def test_a_file_that_is_no_draft(tmp_path: Path, rubbish: bytes):
    path = tmp_path / "x.draft"
    path.write_bytes(rubbish)
    with pytest.raises(RevisionError, match="not a draft of a revision"):
        read_draft(path)


def test_what_is_signed_is_shown_first():
    draft = propose(Revisions(RUN_ID, founding()), "a stolen key", revoked=(MINER.public,))
    lines = "\n".join(authority_drafts.describe(draft.revision))
    for told in ("revision 1", "a stolen key", TRAINER.public.hex()[:16], MINER.public.hex()[:16], "open"):
        assert told in lines


async def announced(target: Target, invitation: Path) -> list[Announcement]:
    """What readers see of a miner that shows what it has."""
    await target.publish()
    node = replace(target.node, proof=admission_proof.make_prover(invitation))
    await node.announce("miner", 60.0)
    await node.announce("miner", 60.0)
    return await find_participants(target.node, "miner")


def test_a_miner_works_where_work_is_asked_for_and_keeps_what_it_did(tmp_path: Path):
    @attack
    async def scenario():
        target = Target(admission=samples.admission(credential="work", difficulty=10))
        assert [item.key for item in await announced(target, tmp_path / "none")] == [TARGET_MINER.public]
        assert len(target.log.named("proof-of-work")) == 1

    scenario()


def test_a_miner_shows_its_invitation(tmp_path: Path):
    @attack
    async def scenario():
        target = Target(admission=samples.admission(policy="invite", inviters=(OTHER.public,)))
        token = sign(Invite(run=target.run_id, key=TARGET_MINER.public, expires_ms=1 << 50), OTHER)
        path = tmp_path / "miner-1.invite"
        path.write_text(token.hex() + "\n")
        assert [item.proof for item in await announced(target, path)] == [token]

    scenario()


def test_a_miner_without_an_invitation_says_what_is_missing(tmp_path: Path):
    @attack
    async def scenario():
        with pytest.raises(KeyFileError, match="no invitation; this run asks for one"):
            await announced(Target(admission=samples.admission(policy="invite")), tmp_path / "miner-1.invite")

    scenario()
