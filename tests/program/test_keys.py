"""Key files, drafts of revisions, and `grailnode keys` and `grailnode admit` where root keys are in several places."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grailnode import UserError
from grailnode.node import admission_credential
from grailnode.run import authority_changes, authority_drafts, key_files
from grailnode.run.authority_drafts import propose, read_draft
from grailnode.run.key_files import read
from protocol.errors import SignatureError
from protocol.identity.admission import Invite
from protocol.identity.authority import Authority, Revisions
from protocol.identity.participant import Announcement
from protocol.identity.signing import SigningKey, sign
from roles.participants import find_participants
from tests.support.attacked_nodes.follower import AttackedFollower
from tests.support.builders import samples
from tests.support.builders.chains import MINER as TARGET_MINER
from tests.support.builders.samples import MINER, RUN_ID, TRAINER, VALIDATOR
from tests.support.processes.command_line import fail, run_command, succeed
from tests.support.simulation.virtual_clock import simulated


def test_a_key_is_created_once_for_its_owner_alone(tmp_path: Path):
    path = tmp_path / "keys" / "miner.key"
    key = key_files.read_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text().strip() not in repr(key)
    assert key_files.read_or_create(path).public == key.public
    with pytest.raises(UserError, match="there is a file already"):
        key_files.create(path)


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [("00" * 32, 0o640, "chmod 600"), *((text, 0o600, "not a key") for text in ("", "zz", "00" * 31, "00" * 33))],
)
def test_a_file_that_others_may_read_or_that_is_no_key_is_refused(tmp_path: Path, text: str, mode: int, message: str):
    path = tmp_path / "a.key"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(UserError, match=message):
        read(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_fifo_or_a_directory_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None]):
    make(tmp_path / "a.key")
    with pytest.raises(UserError, match=r"a\.key: not a regular file"):
        key_files.read_or_create(tmp_path / "a.key")


def test_key_files_are_listed_in_order_and_an_unreadable_directory_is_an_error(tmp_path: Path):
    folder = tmp_path / "keys"
    assert key_files.list_key_files(folder) == []
    for name in ("b.key", "a.key"):
        key_files.create(folder / name)
    (folder / "a.invite").write_text("")
    assert key_files.list_key_files(folder) == [folder / "a.key", folder / "b.key"]
    with pytest.raises(UserError, match=r"a\.key: cannot be listed"):
        key_files.list_key_files(folder / "a.key")


# `grailnode keys` and `grailnode admit` on a run whose root keys are in several places


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Make a run with three root keys, of which two must sign. The first is on this machine, the others in `stick`."""
    directory = tmp_path / "run"
    succeed("init", str(directory), "--roots", "3", "--threshold", "2")
    (tmp_path / "stick").mkdir()
    for name in ("root-2.key", "root-3.key"):
        shutil.move(directory / "keys" / name, tmp_path / "stick" / name)
    return directory


def public_key(path: Path) -> str:
    return SigningKey(read(path)).public.hex()


def publish(run: Path, number: int) -> Authority:
    """Sign a draft with the second root key, publish it, and return its authority."""
    draft = str(run / f"revision-{number}.draft")
    assert f"{draft}: 2 signatures" in succeed("keys", "sign", draft, str(run.parent / "stick" / "root-2.key"))
    output = succeed("keys", "publish", draft, "--run", str(run))
    assert output == f"revision {number} is published; every node obeys it within two minutes\n"
    return read_draft(Path(draft)).revision.authority


def test_a_key_is_rotated_when_enough_roots_have_signed(run: Path):
    keys = run / "keys"
    old = public_key(keys / "trainer.key")
    output = succeed("keys", "rotate", "trainer", "--run", str(run))
    new = public_key(keys / "trainer.next.key")
    assert output.startswith(f"{keys / 'trainer.next.key'}: {new}\n")
    assert new in succeed("keys", "rotate", "trainer", "--run", str(run)), (
        "a rotation that is repeated keeps the new key"
    )
    assert "revision-1.draft: 1 of 2 root keys have signed. Take it to each root key" in output
    error = fail("keys", "publish", str(run / "revision-1.draft"), "--run", str(run))
    assert "1 of 2 root keys have signed; `grailnode keys sign " in error
    assert publish(run, 1).trainers == (bytes.fromhex(new),)
    rows = {line.split()[0]: line.split()[1:] for line in succeed("keys", "show", "--run", str(run)).splitlines()}
    assert rows["trainer"] == [old, "revoked"]
    assert rows["trainer.next"] == [new, "trainer"]
    assert rows["root-1"][1] == "root"
    assert rows["beacon"][1] == "-"


def test_a_signature_that_is_no_roots_is_left_out(run: Path):
    succeed("keys", "rotate", "validator", "--run", str(run))
    draft = str(run / "revision-1.draft")
    succeed("keys", "sign", draft, str(run / "keys" / "miner-1.key"))
    succeed("keys", "sign", draft, str(run.parent / "stick" / "root-3.key"))
    result = run_command("keys", "publish", draft, "--run", str(run))
    assert result.returncode == 0, result.stderr
    miner = public_key(run / "keys" / "miner-1.key")
    assert result.stderr == f"{draft}: the signature of {miner} is left out: it is no root key of this run\n"


def test_a_revocation_lowers_a_quorum_that_could_not_be_reached(run: Path):
    key = public_key(run / "keys" / "miner-1.key")
    succeed("keys", "grant", key, "--run", str(run))
    publish(run, 1)
    assert f"miner-1          {key} validator" in succeed("keys", "show", "--run", str(run))
    assert "validators, 2 of which must accept" in succeed("keys", "quorum", "2", "--run", str(run))
    assert publish(run, 2).quorum == 2
    result = run_command("keys", "revoke", key, "--run", str(run))
    assert result.returncode == 0, result.stderr
    assert result.stderr == "note: quorum falls from 2 to 1, since no more keys are left\n"
    authority = publish(run, 3)
    assert (authority.quorum, authority.revoked) == (1, (bytes.fromhex(key),))
    assert run_command("admit", key, "--run", str(run)).stderr == f"grailnode: {key} is revoked in this run\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (f"revoke {'ab' * 32} --rewind 3", "--rewind 3: this machine's trainer did not publish it; it knows none"),
        ("grant zz", "zz: neither a public key (64 hexadecimal digits) nor a key file"),
        ("rotate nobody", "nobody.key: no such key"),
        ("rotate miner-1", "has no role in this run"),
        ("quorum 1", "1 of 1 validators must accept already"),
        ("revoke keys/trainer.key", "only one of the trainers; name a successor with `grailnode keys rotate`"),
        ("grant keys/validator.key", "has the role validator already"),
        ("quorum 2", "grailnode: 2 of 1 validators can never accept; `grailnode keys grant` adds one\n"),
    ],
)
def test_an_impossible_change_is_an_error_of_one_line(run: Path, change: str, message: str):
    assert message in fail("keys", *change.split(), "--run", "run.toml", cwd=run)
    assert not list(run.glob("*.draft"))


def test_a_miner_is_admitted_as_the_run_demands(run: Path, tmp_path: Path):
    key = "ab" * 32
    assert "this run is open" in succeed("admit", key, "--run", str(run))
    for policy in ("allowlist", "invite"):
        succeed("init", str(tmp_path / policy), "--admission", policy)
    output = succeed("admit", key, "--run", str(tmp_path / "allowlist"))
    assert f"allowed: {key[:16]}" in output
    assert output.endswith("revision 1 is published; every node obeys it within two minutes\n")
    invitation = run_command("admit", key, "--run", str(tmp_path / "invite"), "--days", "3")
    assert invitation.stderr == "for 3 days; on the miner's machine it goes into keys/NAME.invite\n"
    assert bytes.fromhex(invitation.stdout)
    stranger = str(run / "keys" / "miner-1.key")
    refusal = run_command("admit", key, "--run", str(tmp_path / "invite"), "--key", stranger)
    assert refusal.stderr == f"grailnode: {stranger}: no key of an inviter or a root; name one with --key FILE\n"


# Drafts of revisions: signed one key at a time, published when enough have signed; and the credentials of miners


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
    with pytest.raises(UserError, match="revoked in this run for good"):
        authority_changes.grant(after, OTHER.public, "validator")


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
    with pytest.raises(UserError, match="has the role worker already"):
        authority_changes.grant(authority, OTHER.public, "worker")
    authority = changed(authority, authority_changes.replacement, OTHER.public, STRANGER.public)
    assert authority.workers == tuple(sorted((MINER.public, STRANGER.public)))
    for key in (MINER.public, STRANGER.public):
        authority = changed(authority, authority_changes.revocation, key)
    assert authority.workers == ()


@pytest.mark.parametrize("rubbish", [b"", b"\xc1", b"\x80", samples.revision().to_bytes()])
def test_a_file_that_is_no_draft_is_refused(tmp_path: Path, rubbish: bytes):
    path = tmp_path / "x.draft"
    path.write_bytes(rubbish)
    with pytest.raises(UserError, match="not a draft of a revision"):
        read_draft(path)


def test_a_revision_is_described_before_it_is_signed():
    authority = first_authority(workers=(STRANGER.public,))
    draft = propose(Revisions(RUN_ID, authority), "a stolen key", revoked=(MINER.public,))
    lines = "\n".join(authority_drafts.describe(draft.revision))
    for text in ("revision 1", "a stolen key", *(key.public.hex()[:16] for key in (TRAINER, MINER, STRANGER)), "open"):
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
async def test_a_miner_announces_itself_with_its_invitation_and_reports_a_missing_one(tmp_path: Path):
    testbed = AttackedFollower(admission=samples.admission(policy="invite", inviters=(OTHER.public,)))
    path = tmp_path / "miner-1.invite"
    with pytest.raises(UserError, match="no invitation; this run asks for one"):
        await announce(testbed, path)
    token = sign(Invite(run=testbed.run_id, key=TARGET_MINER.public, expires_ms=1 << 50), OTHER)
    path.write_text(token.hex() + "\n")
    assert [item.credential for item in await announce(testbed, path)] == [token]
