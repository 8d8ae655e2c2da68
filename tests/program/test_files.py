"""Commands on a full disk: they write whole files or none, and leave nothing that hinders the next attempt."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from grailnode.cli.main import cli
from grailnode.node.user_errors import explain
from grailnode.run import authority_drafts, key_files
from grailnode.run.files import NewFiles, write_whole
from protocol.identity.authority import Revisions
from tests.support.builders import samples
from tests.support.builders.samples import RUN_ID


@contextmanager
def free_space(size: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def list_files(directory: Path) -> set[str]:
    return {str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()}


def init(directory: Path, *arguments: str) -> str:
    """Run `grailnode init`, and return its error; empty when it succeeds."""
    error = CliRunner().invoke(cli, ["init", str(directory), *arguments]).exception
    return explain(error) or "" if error else ""


def sign(draft: Path, key: Path) -> None:
    """Run `grailnode keys sign`."""
    CliRunner().invoke(cli, ["keys", "sign", str(draft), str(key)], catch_exceptions=False)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path):
    file = tmp_path / "a.draft"
    write_whole(file, b"old")
    with free_space(1), pytest.raises(OSError, match="File too large") as error_info:
        write_whole(file, b"newer")
    assert explain(error_info.value) == f"{file}: file too large"
    assert file.read_bytes() == b"old"
    assert list_files(tmp_path) == {"a.draft"}
    write_whole(file, b"newer")
    assert file.read_bytes() == b"newer"


def test_a_key_that_could_not_be_written_does_not_hinder_the_next_attempt(tmp_path: Path):
    path = tmp_path / "miner-1.key"
    with free_space(10), pytest.raises(key_files.KeyFileError, match=r"miner-1\.key: cannot be written"):
        key_files.create(path)
    assert not path.exists()
    key_files.create(path)


def test_a_failed_command_removes_its_new_files_only(tmp_path: Path):
    (tmp_path / "before").write_bytes(b"")
    files = NewFiles()
    with pytest.raises(KeyboardInterrupt), files:
        files.write(tmp_path / "before", b"")
        files.write(tmp_path / "folder" / "new", b"")
        files.create_key(tmp_path / "a.key")
        raise KeyboardInterrupt
    assert list_files(tmp_path) == {"before"}


BUCKET = ("--bucket", "s3://mine/place")
JOIN = (*BUCKET, "--meeting", "s3://met", "--join", f"https://met.s3.us-east-1.amazonaws.com/runs/{'0' * 64}")


@pytest.mark.parametrize(
    ("arguments", "size", "path"),
    [
        ((), 10, "keys/root.key"),
        ((), 512, "run.manifest"),
        (BUCKET, 512, "run.manifest"),
        (JOIN, 10, "keys/miner-1.key"),
        (JOIN, 200, "run.toml"),
    ],
)
def test_an_init_on_a_full_disk_works_when_there_is_space(
    tmp_path: Path, arguments: tuple[str, ...], size: int, path: str
):
    with free_space(size):
        error = init(tmp_path, *arguments)
    assert error.startswith(f"{tmp_path / path}: ")
    assert "file too large" in error.lower()
    assert not list_files(tmp_path)
    assert init(tmp_path, *arguments) == ""
    assert "run.toml" in list_files(tmp_path)


@pytest.mark.parametrize("arguments", [BUCKET, JOIN])
def test_an_init_whose_last_file_fails_leaves_no_run_behind(tmp_path: Path, arguments: tuple[str, ...]):
    (tmp_path / "bucket" / "lifecycle.json").mkdir(parents=True)
    assert init(tmp_path, *arguments).startswith(f"{tmp_path / 'bucket' / 'lifecycle.json'}: ")
    assert not list_files(tmp_path)
    (tmp_path / "bucket" / "lifecycle.json").rmdir()
    assert init(tmp_path, *arguments) == ""


def test_a_draft_survives_a_signature_that_cannot_be_written(tmp_path: Path):
    draft, key = tmp_path / "revision-1.draft", tmp_path / "root.key"
    write_whole(draft, authority_drafts.propose(Revisions(RUN_ID, samples.authority()), "").to_bytes())
    key_files.create(key)
    with free_space(0), pytest.raises(OSError, match="File too large"):
        sign(draft, key)
    assert not authority_drafts.read_draft(draft).signatures
    sign(draft, key)
    assert len(authority_drafts.read_draft(draft).signatures) == 1
