"""`grailnode convert` and `grailnode inspect` on files, there and back."""

import json
from pathlib import Path

import pytest
import torch

from protocol import patch
from protocol.chain import safetensors
from protocol.digest import digest_weights
from tests.support.builders.chains import changed, small_weights
from tests.support.command_line import run_command


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """base.safetensors, new.safetensors and the patch between them."""
    base = small_weights(0)
    new = changed(changed(base, 1), 2)
    (tmp_path / "base.safetensors").write_bytes(safetensors.write(base))
    (tmp_path / "new.safetensors").write_bytes(safetensors.write(new))
    (tmp_path / "update.patch").write_bytes(patch.encode(base, new))
    return tmp_path


@pytest.mark.parametrize(
    ("other", "there", "made"),
    [("trl", "trl", "trl/deltas/step_000007.safetensors"), ("slime", "slime", "slime/weight_v000007")],
)
def test_a_patch_goes_there_and_comes_back_bit_for_bit(files: Path, other: str, there: str, made: str):
    base = str(files / "base.safetensors")
    numbers = ("--version", "7", "--base-version", "6")
    ended = run_command(
        "convert", str(files / "update.patch"), str(files / there), "--from", "grailnode", "--to", other,
        "--base", base, *numbers,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    ended = run_command(
        "convert", str(files / made), str(files / "back.patch"), "--from", other, "--to", "grailnode", "--base", base
    )
    assert ended.returncode == 0, ended.stderr
    weights = patch.apply(
        safetensors.read((files / "base.safetensors").read_bytes()), (files / "back.patch").read_bytes()
    )
    assert digest_weights(weights) == digest_weights(safetensors.read((files / "new.safetensors").read_bytes()))


def test_a_patch_without_its_base_or_with_another_is_told_in_a_line(files: Path):
    arguments = ("convert", str(files / "update.patch"), str(files / "out"), "--from", "grailnode", "--to", "trl")
    ended = run_command(*arguments)
    assert ended.returncode == 1
    assert "give --base FILE.safetensors" in ended.stderr
    ended = run_command(*arguments, "--base", str(files / "new.safetensors"))
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1
    assert not (files / "out").exists()


def test_inspect_shows_every_changed_tensor_and_the_bound(files: Path):
    ended = run_command("inspect", str(files / "update.patch"), "--base", str(files / "base.safetensors"), "--json")
    assert ended.returncode == 0, ended.stderr
    inspected = json.loads(ended.stdout)
    assert {row["name"] for row in inspected["tensors"]} == {"a", "b"}
    base = safetensors.read((files / "base.safetensors").read_bytes())
    new = safetensors.read((files / "new.safetensors").read_bytes())
    differing = sum(int((base[n].view(torch.int16) != new[n].view(torch.int16)).sum()) for n in base)
    assert inspected["changed"] == differing
    assert all(row["bound"] is not None for row in inspected["tensors"])
    truncated = files / "cut.patch"
    truncated.write_bytes((files / "update.patch").read_bytes()[:20])
    ended = run_command("inspect", str(truncated))
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"grailnode: {truncated}, ")
    ended = run_command("inspect", str(files / "update.patch"), "--base", str(truncated))
    assert ended.stderr.startswith(f"grailnode: {truncated}: ")
