"""Reading policy directories, and the files that bring a restarted engine back to its version."""

import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grailnode.engine.models import build
from grailnode.engine.policy import Policy, PolicyError, load_weights
from grailnode.engine.vllm.checkpoints import Checkpoints, RecoveryStep
from grailnode.engine.vllm.vllm_engine import VllmEngine
from grailnode.engine.vllm.vllm_server import ExternalServer
from protocol.digest import digest_weights
from roles.ports import EngineError
from tests.support.builders.policies import random_weights, write_policy


def test_sharded_weights_with_a_tied_copy_in_float32(tmp_path: Path) -> None:
    write_policy(tmp_path)
    weights = load_weights(tmp_path)
    names = sorted(weights)
    full = {name: tensor.to(torch.float32) for name, tensor in weights.items()}
    full["lm_head.weight"] = full["model.embed_tokens.weight"].clone()
    first, second = names[:5], [*names[5:], "lm_head.weight"]
    files = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
    for file, part in files.items():
        save_file({name: full[name] for name in part}, tmp_path / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model.safetensors").unlink()
    sharded = load_weights(tmp_path)
    assert list(sharded) == names
    assert all(tensor.dtype == torch.bfloat16 and tensor.is_contiguous() for tensor in sharded.values())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in sharded.items())


@pytest.mark.parametrize(
    ("changes", "stops"), [({}, (1,)), ({"eos_token_id": 7}, (7,)), ({"eos_token_id": [9, 7, 9]}, (7, 9))]
)
def test_the_generation_config_says_which_tokens_end_a_completion(
    tmp_path: Path, changes: dict[str, object], stops: tuple[int, ...]
) -> None:
    write_policy(tmp_path)
    if changes:
        (tmp_path / "generation_config.json").write_text(json.dumps(changes))
    assert Policy.load(tmp_path).stops == stops


@pytest.mark.parametrize("value", [[], "1", [1, "2"], True, -1, list(range(17))])
def test_stop_tokens_that_are_no_list_of_ids_are_refused(tmp_path: Path, value: object) -> None:
    write_policy(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(PolicyError, match="eos_token_id is not usable"):
        Policy.load(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "cannot be read"),
        ("config.json", b"{", "not JSON"),
        ("config.json", b"[]", "not a JSON object"),
        ("config.json", b"\xff", "cannot be read"),
        ("config.json", {"eos_token_id": None}, "eos_token_id"),
        ("config.json", {"vocab_size": None}, "vocab_size"),
        ("tokenizer.json", None, "cannot be read"),
        ("tokenizer.json", b"{}", "not a tokenizer"),
        ("model.safetensors", None, "cannot be read as safetensors"),
        ("model.safetensors", b"\x00" * 64, "cannot be read as safetensors"),
        ("model.safetensors.index.json", b"{}", "weight_map"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../b"}}', "outside the directory"),
    ],
)
def test_errors_name_the_file(tmp_path: Path, file: str, content: bytes | dict[str, None] | None, message: str) -> None:
    config: dict[str, object] = dict(write_policy(tmp_path).config)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content if isinstance(content, bytes) else json.dumps(config | content).encode())
    with pytest.raises(PolicyError, match=message) as raises:
        assert Policy.load(tmp_path).vocabulary
        load_weights(tmp_path)
    assert file.removesuffix(".index.json") in str(raises.value)


def test_quantized_checkpoints_are_refused(tmp_path: Path) -> None:
    write_policy(tmp_path)
    save_file({"model.norm.weight": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(PolicyError, match="not quantized"):
        load_weights(tmp_path)


# The files that bring a restarted engine back to its version


WEIGHTS = {
    "a": torch.arange(600, dtype=torch.float32).to(torch.bfloat16).view(20, 30),
    "b": torch.ones(7, dtype=torch.bfloat16),
}


def stage_weights(files: Checkpoints, version: int) -> None:
    path = files.write_weights(version, WEIGHTS)
    files.drop_staged()
    files.staged = RecoveryStep("weights", version, digest_weights(WEIGHTS), path)


def test_a_checkpoint_replaces_what_lies_before_it(tmp_path: Path) -> None:
    files = Checkpoints(tmp_path)
    for version in range(3):
        stage_weights(files, version)
        files.commit()
        for number in (7, 8):
            files.staged = RecoveryStep("patch", number, bytes(32), files.write_patch(number, bytes(9)))
            files.commit()
    assert [step.version for step in files.steps] == [2, 7, 8]
    assert sorted(tmp_path.iterdir()) == sorted(step.path for step in files.steps)
    assert digest_weights(load_file(files.steps[0].path)) == files.steps[0].digest


def test_files_of_an_earlier_process_and_of_a_staged_version_that_is_replaced_are_removed(tmp_path: Path) -> None:
    Checkpoints(tmp_path).write_weights(0, WEIGHTS)
    files = Checkpoints(tmp_path)
    assert not list(tmp_path.iterdir())
    for version in range(2):
        stage_weights(files, version)
    files.commit()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_is_not_filled_with_parts_of_files(tmp_path: Path) -> None:
    files = Checkpoints(tmp_path)
    stage_weights(files, 0)
    files.commit()
    before = sorted(tmp_path.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        for write in (lambda: stage_weights(files, 2), lambda: files.write_patch(2, bytes(1001))):
            with pytest.raises(OSError, match="File too large"):
                write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(tmp_path.iterdir()) == before
    assert not files.staged


async def test_a_disk_that_cannot_be_written_or_a_server_that_nobody_started_refuses_the_stage(tmp_path: Path) -> None:
    model = build(write_policy(tmp_path / "policy"))
    engine = VllmEngine(model, ExternalServer("http://127.0.0.1:9", start_seconds=0.1), tmp_path / "engine")
    with pytest.raises(EngineError, match=r"engine\.url: http://127\.0\.0\.1:9 was not ready within 0\.1 s"):
        await engine.stage(0, random_weights(model))
    (tmp_path / "engine").rmdir()
    with pytest.raises(EngineError, match="files cannot be written"):
        await engine.stage(0, random_weights(model))
    with pytest.raises(EngineError, match="nothing is staged"):
        await engine.commit()
