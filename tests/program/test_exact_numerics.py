"""`grailnode init --numerics exact`, and engines that do not compute the bits of such a run."""

from dataclasses import replace
from pathlib import Path

import pytest

from grailnode.config import ConfigError
from grailnode.engine.models import build_exact
from grailnode.engine.policy import PACKAGED_POLICY, Policy, PolicyError
from grailnode.node.role_processes import check_start
from grailnode.run import creation, workspace
from grailnode.run.creation import open_run
from grailnode.run.joining import open_config
from grailnode.run.workspace import WorkspaceError
from protocol.proof import EXACT_PROOF
from tests.support.processes.command_line import run_command


def exact_run(directory: Path) -> str:
    """Create an exact run, and return its run.toml."""
    return str(workspace.create(directory, creation.Choices(numerics="exact"), workspace.Pace()).config)


def test_init_makes_a_run_that_tolerates_nothing(tmp_path: Path) -> None:
    result = run_command("init", str(tmp_path), "--numerics", "exact")
    assert result.returncode == 0, result.stderr
    run = open_run((tmp_path / "run.manifest").read_bytes()).record
    assert (run.numerics, run.proof) == ("exact", EXACT_PROOF)


@pytest.mark.parametrize(
    "overrides", [("engine.dtype='bfloat16'",), ("engine.kind='vllm'", "engine.url='http://127.0.0.1:1'")], ids=str
)
@pytest.mark.parametrize("role", ["miner", "validator"])
def test_another_engine_is_refused_at_the_start_in_one_line(tmp_path: Path, role: str, overrides: tuple[str]) -> None:
    config = open_config(exact_run(tmp_path), overrides)
    with pytest.raises(ConfigError, match=r'numerics are exact.*engine\.dtype = "float32"') as error_info:
        check_start(config, role, "validator" if role == "validator" else "miner-1", print)  # type: ignore[arg-type]
    line = str(error_info.value)
    assert "\n" not in line
    assert ("compute capability 8.0" in line) == ("vllm" in str(overrides))


def test_a_policy_that_exact_arithmetic_does_not_cover_is_refused() -> None:
    policy = Policy.load(PACKAGED_POLICY)
    with pytest.raises(PolicyError, match="cover plain Qwen3, and this is 'qwen2'"):
        build_exact(replace(policy, config={**policy.config, "model_type": "qwen2"}))


@pytest.mark.parametrize(
    ("changes", "proof", "error"),
    [
        ({"top_k": 5}, None, "without --top-k"),
        ({"lora_rank": 4}, None, "does not cover adapters"),
        ({}, Path("proof.json"), "no measured thresholds"),
    ],
)
def test_what_an_exact_run_cannot_have_is_refused(
    tmp_path: Path, changes: dict[str, int], proof: Path | None, error: str
) -> None:
    choices = creation.Choices(numerics="exact", **changes)  # type: ignore[arg-type]
    with pytest.raises(WorkspaceError, match=error):
        workspace.create(tmp_path, choices, workspace.Pace(), proof=proof)
