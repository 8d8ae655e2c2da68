"""Drafts of revisions: signed one key at a time, published when enough have signed; and the credentials of miners."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grailnode.node import admission_credential
from grailnode.run import authority_changes, authority_drafts
from grailnode.run.authority_drafts import RevisionError, propose, read_draft
from grailnode.run.key_files import KeyFileError
from protocol.errors import SignatureError
from protocol.identity.admission import Invite
from protocol.identity.authority import Authority, Revisions
from protocol.identity.participant import Announcement
from protocol.identity.signing import sign
from roles.participants import find_participants
from tests.support.attacked_nodes.follower import AttackedFollower
from tests.support.builders import samples
from tests.support.builders.chains import MINER as TARGET_MINER
from tests.support.builders.samples import MINER, RUN_ID, TRAINER, VALIDATOR
from tests.support.simulation.virtual_clock import simulated

ROOTS = tuple(samples.key(f"root {number}") for number in range(3))
OTHER = samples.key("other")
STRANGER = samples.key("stranger")


def first_authority(**changes: Any) -> Authority:
    roots = {"roots": tuple(root.public for root in ROOTS), "root_threshold": 2}
    return samples.authority(**(roots | changes))


def changed(authority: Authority, change: Callable[..., dict[str, Any]], *arguments: bytes | str) -> Authority:
    """Return the authority after one of the changes of `authority_changes`."""
    draft = propose(Revisions(RUN_ID, authority), "", **change(authority, *arguments))
    return draft.revision.authority


def test_new_roots_must_sign_too():
    revisions = Revisions(RUN_ID, first_authority())
    draft = propose(revisions, "", **authority_changes.replacement(revisions.current, ROOTS[0].public, OTHER.public))
    draft = draft.signed_by(ROOTS[0]).signed_by(ROOTS[1]).signed_by(ROOTS[0])  # once for each key
    assert authority_drafts.missing_signatures(draft, revisions) == "1 of 2 new root keys have signed"
    with pytest.raises(SignatureError):
        revisions.check(1, draft.envelope())
    draft = draft.signed_by(OTHER)
    assert authority_drafts.missing_signatures(draft, revisions) == ""
    revisions.adopt(revisions.check(1, draft.envelope()))


def test_revoking_takes_every_role():
    inviting = samples.admission(policy="invite", inviters=(OTHER.public,), allowed=(OTHER.public,))
    authority = first_authority(validators=(VALIDATOR.public, OTHER.public), quorum=2, admission=inviting)
    after = changed(authority, authority_changes.revocation, OTHER.public)
    assert (after.validators, after.quorum, after.revoked) == ((VALIDATOR.public,), 1, (OTHER.public,))
    assert after.admission.inviters == after.admission.allowed == ()


def test_a_role_is_granted_to_one_more_key():
    authority = first_authority()
    after = changed(authority, authority_changes.grant, OTHER.public, "validator")
    assert (after.validators, after.quorum) == ((*authority.validators, OTHER.public), authority.quorum)
    after = changed(authority, authority_changes.grant, OTHER.public, "inviter")
    assert after.admission.inviters == (OTHER.public,)


def test_workers_stay_in_order_and_the_last_of_them_may_be_revoked():
    authority = first_authority()
    for key in (MINER.public, OTHER.public):
        authority = changed(authority, authority_changes.grant, key, "worker")
    assert authority.workers == tuple(sorted((MINER.public, OTHER.public)))
    with pytest.raises(RevisionError, match="has the role worker already"):
        authority_changes.grant(authority, OTHER.public, "worker")
    replacement = authority_changes.replacement(authority, OTHER.public, STRANGER.public)
    draft = propose(Revisions(RUN_ID, authority), "", **replacement)
    authority = draft.revision.authority
    assert authority.workers == tuple(sorted((MINER.public, STRANGER.public)))
    assert STRANGER.public.hex()[:16] in "\n".join(authority_drafts.describe(draft.revision))
    for key in (MINER.public, STRANGER.public):
        authority = changed(authority, authority_changes.revocation, key)
    assert authority.workers == ()


def test_impossible_changes_are_refused():
    authority = first_authority()
    with pytest.raises(RevisionError, match="only one of the trainers; name a successor with `grailnode keys rotate`"):
        authority_changes.revocation(authority, TRAINER.public)
    with pytest.raises(RevisionError, match="has no role"):
        authority_changes.replacement(authority, MINER.public, OTHER.public)
    with pytest.raises(RevisionError, match="impossible authority"):
        propose(Revisions(RUN_ID, authority), "", quorum=5)
    with pytest.raises(RevisionError, match="has the role validator already"):
        authority_changes.grant(authority, VALIDATOR.public, "validator")
    with pytest.raises(RevisionError, match="revoked in this run for good"):
        authority_changes.grant(first_authority(revoked=(OTHER.public,)), OTHER.public, "validator")


@pytest.mark.parametrize("rubbish", [b"", b"\xc1", b"\x80", samples.revision().to_bytes()])
def test_a_file_that_is_no_draft_is_refused(tmp_path: Path, rubbish: bytes):
    path = tmp_path / "x.draft"
    path.write_bytes(rubbish)
    with pytest.raises(RevisionError, match="not a draft of a revision"):
        read_draft(path)


def test_a_revision_is_described_before_it_is_signed():
    draft = propose(Revisions(RUN_ID, first_authority()), "a stolen key", revoked=(MINER.public,))
    lines = "\n".join(authority_drafts.describe(draft.revision))
    for text in ("revision 1", "a stolen key", TRAINER.public.hex()[:16], MINER.public.hex()[:16], "open"):
        assert text in lines


async def announce(testbed: AttackedFollower, invitation: Path) -> list[Announcement]:
    """Let a miner announce itself with its credentials, and return what readers accept of that."""
    await testbed.publish()
    node = replace(testbed.node, credential=admission_credential.make_credential_source(invitation))
    await node.announce("miner", 60.0)
    await node.announce("miner", 60.0)
    return await find_participants(testbed.node, "miner")


@simulated
async def test_a_miner_does_a_proof_of_work_once(tmp_path: Path):
    testbed = AttackedFollower(admission=samples.admission(credential="work", difficulty=10))
    assert [item.key for item in await announce(testbed, tmp_path / "none")] == [TARGET_MINER.public]
    assert len(testbed.log.named("proof-of-work")) == 1


@simulated
async def test_a_miner_announces_itself_with_its_invitation(tmp_path: Path):
    testbed = AttackedFollower(admission=samples.admission(policy="invite", inviters=(OTHER.public,)))
    token = sign(Invite(run=testbed.run_id, key=TARGET_MINER.public, expires_ms=1 << 50), OTHER)
    path = tmp_path / "miner-1.invite"
    path.write_text(token.hex() + "\n")
    assert [item.credential for item in await announce(testbed, path)] == [token]


@simulated
async def test_a_missing_invitation_is_reported(tmp_path: Path):
    with pytest.raises(KeyFileError, match="no invitation; this run asks for one"):
        await announce(AttackedFollower(admission=samples.admission(policy="invite")), tmp_path / "miner-1.invite")
