"""`grailnode convert` and `grailnode inspect` on files, there and back."""

import json
from pathlib import Path

import pytest
import torch

from protocol import patch
from protocol.chain import safetensors
from protocol.digest import digest_weights
from tests.support.builders.chains import change_elements, small_weights
from tests.support.processes.command_line import run_command


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
    result = run_command("convert", str(files / "update.patch"), str(files / out), *formats, *base, *numbers)
    assert result.returncode == 0, result.stderr
    formats = ("--from", format_name, "--to", "grailnode")
    result = run_command("convert", str(files / update), str(files / "back.patch"), *formats, *base)
    assert result.returncode == 0, result.stderr
    weights = patch.apply(
        safetensors.read((files / "base.safetensors").read_bytes()), (files / "back.patch").read_bytes()
    )
    assert digest_weights(weights) == digest_weights(safetensors.read((files / "new.safetensors").read_bytes()))


def test_a_patch_without_its_base_or_with_another_is_an_error_of_one_line(files: Path):
    arguments = ("convert", str(files / "update.patch"), str(files / "out"), "--from", "grailnode", "--to", "trl")
    result = run_command(*arguments)
    assert result.returncode == 1
    assert "give --base FILE.safetensors" in result.stderr
    result = run_command(*arguments, "--base", str(files / "new.safetensors"))
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert not (files / "out").exists()


def test_inspect_shows_every_changed_tensor_and_the_bound(files: Path):
    result = run_command("inspect", str(files / "update.patch"), "--base", str(files / "base.safetensors"), "--json")
    assert result.returncode == 0, result.stderr
    inspected = json.loads(result.stdout)
    assert {row["name"] for row in inspected["tensors"]} == {"a", "b"}
    base = safetensors.read((files / "base.safetensors").read_bytes())
    new = safetensors.read((files / "new.safetensors").read_bytes())
    differing = sum(int((base[n].view(torch.int16) != new[n].view(torch.int16)).sum()) for n in base)
    assert inspected["changed"] == differing
    assert all(row["bound"] is not None for row in inspected["tensors"])
    short_patch = files / "cut.patch"
    short_patch.write_bytes((files / "update.patch").read_bytes()[:20])
    result = run_command("inspect", str(short_patch))
    assert result.returncode == 1
    assert result.stderr.startswith(f"grailnode: {short_patch}, ")
    result = run_command("inspect", str(files / "update.patch"), "--base", str(short_patch))
    assert result.stderr.startswith(f"grailnode: {short_patch}: ")
