"""What commands write on a disk that fills up: whole files or none, and nothing that hinders the next try."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from grailnode.cli.authority_verbs import sign_draft
from grailnode.cli.main import cli
from grailnode.node.user_errors import explain
from grailnode.run import authority_drafts, key_files
from grailnode.run.files import NewFiles, write_whole
from protocol.identity.authority import Revisions
from tests.support.builders import samples
from tests.support.builders.samples import RUN_ID


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Within it no file can grow beyond so many bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def listed(directory: Path) -> set[str]:
    return {str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()}


def init(directory: Path, *arguments: str) -> str:
    """What `grailnode init` says when it fails; empty when it does not."""
    ended = CliRunner().invoke(cli, ["init", str(directory), *arguments])
    return explain(ended.exception) or "" if ended.exception else ""


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path):
    file = tmp_path / "a.draft"
    write_whole(file, b"old")
    with room_for(1), pytest.raises(OSError, match="File too large") as caught:
        write_whole(file, b"newer")
    assert explain(caught.value) == f"{file}: file too large"
    assert file.read_bytes() == b"old"
    assert listed(tmp_path) == {"a.draft"}
    write_whole(file, b"newer")
    assert file.read_bytes() == b"newer"


def test_a_key_that_could_not_be_written_is_not_in_the_way(tmp_path: Path):
    path = tmp_path / "miner-1.key"
    with room_for(10), pytest.raises(key_files.KeyFileError, match=r"miner-1\.key: cannot be written"):
        key_files.create(path)
    assert not path.exists()
    key_files.create(path)


def test_what_a_failed_command_wrote_is_gone_and_what_was_there_before_is_not(tmp_path: Path):
    (tmp_path / "before").write_bytes(b"")
    files = NewFiles()
    with pytest.raises(KeyboardInterrupt), files:
        files.write(tmp_path / "before", b"")
        files.write(tmp_path / "folder" / "new", b"")
        files.create_key(tmp_path / "a.key")
        raise KeyboardInterrupt
    assert listed(tmp_path) == {"before"}


BUCKET = ("--bucket", "s3://mine/place")
JOIN = (*BUCKET, "--meeting", "s3://met", "--join", f"https://met.s3.us-east-1.amazonaws.com/runs/{'0' * 64}")


@pytest.mark.parametrize(
    ("arguments", "room", "named"),
    [
        ((), 10, "keys/root.key"),
        ((), 512, "run.manifest"),
        (BUCKET, 512, "run.manifest"),
        (JOIN, 10, "keys/miner-1.key"),
        (JOIN, 200, "run.toml"),
    ],
)
def test_an_init_that_had_no_room_works_when_there_is(
    tmp_path: Path, arguments: tuple[str, ...], room: int, named: str
):
    with room_for(room):
        told = init(tmp_path, *arguments)
    assert told.startswith(f"{tmp_path / named}: ")
    assert "file too large" in told.lower()
    assert not listed(tmp_path)
    assert init(tmp_path, *arguments) == ""
    assert "run.toml" in listed(tmp_path)


@pytest.mark.parametrize("arguments", [BUCKET, JOIN])
def test_an_init_whose_last_file_fails_leaves_no_run_behind(tmp_path: Path, arguments: tuple[str, ...]):
    (tmp_path / "bucket" / "lifecycle.json").mkdir(parents=True)
    assert init(tmp_path, *arguments).startswith(f"{tmp_path / 'bucket' / 'lifecycle.json'}: ")
    assert not listed(tmp_path)
    (tmp_path / "bucket" / "lifecycle.json").rmdir()
    assert init(tmp_path, *arguments) == ""


def test_a_draft_survives_a_signature_that_there_is_no_room_for(tmp_path: Path):
    draft, key = tmp_path / "revision-1.draft", tmp_path / "root.key"
    write_whole(draft, authority_drafts.propose(Revisions(RUN_ID, samples.authority()), "").to_bytes())
    key_files.create(key)
    with room_for(0), pytest.raises(OSError, match="File too large"):
        sign_draft(draft, key)
    assert not authority_drafts.read_draft(draft).signatures
    sign_draft(draft, key)
    assert len(authority_drafts.read_draft(draft).signatures) == 1
