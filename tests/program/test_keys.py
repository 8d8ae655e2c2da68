"""Key files, and `grailnode keys` and `grailnode admit` on a run whose root keys are in several places."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from grailnode.run import key_files
from grailnode.run.authority_drafts import read_draft
from grailnode.run.key_files import read
from protocol.identity.authority import Authority
from protocol.identity.signing import SigningKey
from tests.support.processes.command_line import fail, run_command, succeed


def test_a_key_is_created_once_for_its_owner_alone(tmp_path: Path):
    path = tmp_path / "keys" / "miner.key"
    key = key_files.read_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert key_files.read_or_create(path).public == key.public
    with pytest.raises(key_files.KeyFileError, match="there is a file already"):
        key_files.create(path)


def test_a_key_that_others_may_read_is_refused_with_the_remedy(tmp_path: Path):
    path = tmp_path / "a.key"
    key_files.create(path)
    path.chmod(0o640)
    with pytest.raises(key_files.KeyFileError, match="chmod 600"):
        key_files.read(path)


@pytest.mark.parametrize("text", ["", "zz", "00" * 31, "00" * 33])
def test_a_file_that_is_no_key_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "a.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(key_files.KeyFileError, match="not a key"):
        key_files.read(path)


def test_a_key_never_shows_its_secret(tmp_path: Path):
    secret = key_files.create(tmp_path / "a.key")
    key = key_files.read_or_create(tmp_path / "a.key")
    assert secret.hex() not in repr(key)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_fifo_or_a_directory_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None]):
    path = tmp_path / "a.key"
    make(path)
    with pytest.raises(key_files.KeyFileError, match=r"a\.key: not a regular file"):
        key_files.read_or_create(path)


def test_key_files_are_listed_in_order_and_an_unreadable_directory_is_an_error(tmp_path: Path):
    folder = tmp_path / "keys"
    assert key_files.list_key_files(folder) == []
    for name in ("b.key", "a.key"):
        key_files.create(folder / name)
    (folder / "a.invite").write_text("")
    assert key_files.list_key_files(folder) == [folder / "a.key", folder / "b.key"]
    with pytest.raises(key_files.KeyFileError, match=r"a\.key: cannot be listed"):
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
    assert "revision-1.draft: 1 of 2 root keys have signed. Take it to each root key" in output
    error = fail("keys", "publish", str(run / "revision-1.draft"), "--run", str(run))
    assert "1 of 2 root keys have signed; `grailnode keys sign " in error
    assert publish(run, 1).trainers == (bytes.fromhex(new),)
    rows = {line.split()[0]: line.split()[1:] for line in succeed("keys", "show", "--run", str(run)).splitlines()}
    assert rows["trainer"] == [old, "revoked"]
    assert rows["trainer.next"] == [new, "trainer"]
    assert rows["root-1"][1] == "root"
    assert rows["beacon"][1] == "-"


def test_a_rotation_that_is_repeated_keeps_the_new_key(run: Path):
    succeed("keys", "rotate", "trainer", "--run", str(run))
    new = public_key(run / "keys" / "trainer.next.key")
    assert new in succeed("keys", "rotate", "trainer", "--run", str(run))


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
    succeed("keys", "quorum", "2", "--run", str(run))
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
    ],
)
def test_an_impossible_change_is_an_error_of_one_line(run: Path, change: str, message: str):
    assert message in fail("keys", *change.split(), "--run", str(run))
    assert not list(run.glob("*.draft"))


def test_a_miner_is_admitted_as_the_run_demands(run: Path, tmp_path: Path):
    key = "ab" * 32
    assert "this run is open" in succeed("admit", key, "--run", str(run))
    expected = "grailnode: zz: neither a public key (64 hexadecimal digits) nor a key file\n"
    assert run_command("admit", "zz", "--run", str(run)).stderr == expected
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
