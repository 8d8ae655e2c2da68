"""The files that bring a restarted engine back to its version."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grailnode.engine.models import build
from grailnode.engine.vllm import checkpoints
from grailnode.engine.vllm.checkpoints import Checkpoints, RecoveryStep
from grailnode.engine.vllm.vllm_engine import VllmEngine
from grailnode.engine.vllm.vllm_server import ExternalServer
from protocol.digest import digest_weights
from protocol.patch import encode
from roles.ports import EngineError
from tests.engine.engine_contract import changed
from tests.support.builders.policies import random_weights, write_policy

WEIGHTS = {
    "a": torch.arange(600, dtype=torch.float32).to(torch.bfloat16).view(20, 30),
    "b": torch.ones(7, dtype=torch.bfloat16),
}


def test_patches_are_applied_to_the_checkpoint_when_there_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "MAX_PATCHES", 3)
    files, weights = Checkpoints(tmp_path), WEIGHTS
    files.stage(RecoveryStep("stage_weights", 0, digest_weights(weights), files.write_weights(0, weights)))
    files.commit()
    for version in range(1, 10):
        files.compact()
        target = changed(weights, version, 0.2)
        path = files.write_patch(version, encode(weights, target))
        files.stage(RecoveryStep("stage_patch", version, digest_weights(target), path))
        files.commit()
        weights = target
        assert len(files.steps()) <= 5
        assert len(list(tmp_path.iterdir())) == len(files.steps())
        if len(files.steps()) == 1:
            assert digest_weights(load_file(files.steps()[0].path)) == files.steps()[0].digest
    monkeypatch.setattr(checkpoints, "MAX_PATCHES", 0)
    files.compact()
    (step,) = files.steps()
    assert (step.command, step.version, step.digest) == ("stage_weights", 9, digest_weights(weights))
    assert digest_weights(load_file(step.path)) == digest_weights(weights)


def test_a_checkpoint_replaces_what_lies_before_it(tmp_path: Path) -> None:
    files = Checkpoints(tmp_path)
    for version in range(3):
        path = files.write_weights(version, WEIGHTS)
        files.stage(RecoveryStep("stage_weights", version, digest_weights(WEIGHTS), path))
        files.commit()
    assert [step.version for step in files.steps()] == [2]
    assert len(list(tmp_path.iterdir())) == 1


def test_files_of_an_earlier_process_are_removed(tmp_path: Path) -> None:
    files = Checkpoints(tmp_path)
    files.write_weights(0, WEIGHTS)
    Checkpoints(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_staged_version_that_is_replaced_leaves_no_file(tmp_path: Path) -> None:
    files = Checkpoints(tmp_path)
    for version in range(2):
        path = files.write_weights(version, WEIGHTS)
        files.stage(RecoveryStep("stage_weights", version, digest_weights(WEIGHTS), path))
    files.commit()
    assert len(list(tmp_path.iterdir())) == 1


async def test_a_disk_that_cannot_be_written_refuses_the_stage(tmp_path: Path) -> None:
    model = build(write_policy(tmp_path / "policy"))
    engine = VllmEngine(model, ExternalServer("http://127.0.0.1:9"), tmp_path / "engine")
    (tmp_path / "engine").rmdir()
    with pytest.raises(EngineError, match="files cannot be written"):
        await engine.stage(0, random_weights(model))
    with pytest.raises(EngineError, match="nothing is staged"):
        await engine.commit()


async def test_a_server_that_nobody_started_is_named(tmp_path: Path) -> None:
    model = build(write_policy(tmp_path / "policy"))
    engine = VllmEngine(model, ExternalServer("http://127.0.0.1:9", start_seconds=0.1), tmp_path / "engine")
    with pytest.raises(EngineError, match=r"engine\.url: http://127\.0\.0\.1:9 was not ready within 0\.1 s"):
        await engine.stage(0, random_weights(model))
