"""Commands on files: `grailnode convert` and `inspect` there and back, and whole files or none on a full disk."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from grailnode.cli.main import cli
from grailnode.node.user_errors import explain
from grailnode.run import authority_drafts, key_files
from grailnode.run.files import NewFiles, write_whole
from protocol import patch
from protocol.chain import safetensors
from protocol.digest import digest_weights
from protocol.identity.authority import Revisions
from tests.support.builders import samples
from tests.support.builders.chains import change_elements, small_weights
from tests.support.builders.samples import RUN_ID
from tests.support.faults.full_disk import free_space
from tests.support.processes.command_line import fail, run_command, succeed


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Write base.safetensors, new.safetensors and the patch between them."""
    base = small_weights(0)
    new = change_elements(change_elements(base, 1), 2)
    (tmp_path / "base.safetensors").write_bytes(safetensors.write(base))
    (tmp_path / "new.safetensors").write_bytes(safetensors.write(new))
    (tmp_path / "update.patch").write_bytes(patch.encode(base, new))
    return tmp_path


@pytest.mark.parametrize(
    ("format_name", "out", "update"),
    [("trl", "trl", "trl/deltas/step_000007.safetensors"), ("slime", "slime", "slime/weight_v000007")],
)
def test_a_patch_is_converted_and_back_bit_for_bit(files: Path, format_name: str, out: str, update: str):
    base = ("--base", str(files / "base.safetensors"))
    numbers = ("--version", "7", "--base-version", "6")
    formats = ("--from", "grailnode", "--to", format_name)
    succeed("convert", str(files / "update.patch"), str(files / out), *formats, *base, *numbers)
    formats = ("--from", format_name, "--to", "grailnode")
    succeed("convert", str(files / update), str(files / "back.patch"), *formats, *base)
    old, new = (safetensors.read((files / f"{name}.safetensors").read_bytes()) for name in ("base", "new"))
    assert digest_weights(patch.apply(old, (files / "back.patch").read_bytes())) == digest_weights(new)


def test_a_patch_without_its_base_or_with_another_is_an_error_of_one_line(files: Path):
    arguments = ("convert", str(files / "update.patch"), str(files / "out"), "--from", "grailnode", "--to", "trl")
    assert "give --base FILE.safetensors" in fail(*arguments)
    assert len(fail(*arguments, "--base", str(files / "new.safetensors")).splitlines()) == 1
    assert not (files / "out").exists()


def test_inspect_shows_every_changed_tensor_and_the_bound(files: Path):
    output = succeed("inspect", str(files / "update.patch"), "--base", str(files / "base.safetensors"), "--json")
    inspected = json.loads(output)
    assert {row["name"] for row in inspected["tensors"]} == {"a", "b"}
    base, new = (safetensors.read((files / f"{name}.safetensors").read_bytes()) for name in ("base", "new"))
    differing = sum(int((base[n].view(torch.int16) != new[n].view(torch.int16)).sum()) for n in base)
    assert inspected["changed"] == differing
    assert all(row["bound"] is not None for row in inspected["tensors"])
    short_patch = files / "cut.patch"
    short_patch.write_bytes((files / "update.patch").read_bytes()[:20])
    assert fail("inspect", str(short_patch)).startswith(f"grailnode: {short_patch}, ")
    result = run_command("inspect", str(files / "update.patch"), "--base", str(short_patch))
    assert result.stderr.startswith(f"grailnode: {short_patch}: ")


# Commands on a full disk: they write whole files or none, and leave nothing that hinders the next attempt


def list_files(directory: Path) -> set[str]:
    return {str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()}


def init(directory: Path, *arguments: str) -> str:
    """Run `grailnode init`, and return its error; empty when it succeeds."""
    error = CliRunner().invoke(cli, ["init", str(directory), *arguments]).exception
    return explain(error) or "" if error else ""


def sign(draft: Path, key: Path) -> None:
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
    ("options", "size", "path"),
    [
        ((), 10, "keys/root.key"),
        ((), 512, "run.manifest"),
        (BUCKET, 512, "run.manifest"),
        (JOIN, 10, "keys/miner-1.key"),
        (JOIN, 200, "run.toml"),
    ],
)
def test_init_on_a_full_disk_works_when_there_is_space(tmp_path: Path, options: tuple[str, ...], size: int, path: str):
    with free_space(size):
        error = init(tmp_path, *options)
    assert error.startswith(f"{tmp_path / path}: ")
    assert "file too large" in error.lower()
    assert not list_files(tmp_path)
    assert init(tmp_path, *options) == ""
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
