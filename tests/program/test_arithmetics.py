"""How nodes may compute: what `init` signs, exact runs, and what a node says whose engine the run does not admit."""

from bisect import bisect_left
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grailnode import UserError
from grailnode.calibration import proof_file
from grailnode.calibration.proof_file import ProofFile, ProofFileError
from grailnode.engine.models import build_exact
from grailnode.engine.policy import PACKAGED_POLICY, Policy, PolicyError
from grailnode.node.role_checks import check_start
from grailnode.run import workspace
from grailnode.run.creation import open_run
from grailnode.run.joining import open_config
from tests.support.builders.recipes import demo_recipe
from tests.support.processes.command_line import succeed

BFLOAT16 = "engine.dtype='bfloat16'"
VLLM = ("engine.kind='vllm'", "engine.url='http://127.0.0.1:1'")


@pytest.mark.parametrize(
    ("role", "overrides", "own", "command"),
    [
        ("miner", (BFLOAT16,), "torch-bfloat16", "--miner torch-bfloat16 --validator torch-float32"),
        ("validator", (BFLOAT16,), "torch-bfloat16", "--miner torch-float32 --validator torch-bfloat16"),
        ("miner", VLLM, "vllm-float32", "--miner vllm-float32 --validator torch-float32"),
        ("validator", VLLM, "vllm-float32", "--miner torch-float32 --validator vllm-float32"),
        ("trainer", (BFLOAT16, "trainer.canaries=1"), "torch-bfloat16", "--miner torch-bfloat16"),
    ],
)
def test_a_node_without_thresholds_is_refused_with_the_command_that_measures_them(
    run_toml: Path, role: str, overrides: tuple[str, ...], own: str, command: str
) -> None:
    config = open_config(str(run_toml), overrides)
    with pytest.raises(UserError) as error_info:
        check_start(config, role, "miner-1" if role == "miner" else role, print)  # type: ignore[arg-type]
    line = str(error_info.value)
    assert "\n" not in line
    assert f"this node would compute in {own}, for which it has no thresholds" in line
    assert f"`grailnode calibrate {command}" in line


def test_init_refuses_a_pair_that_was_not_measured(tmp_path: Path) -> None:
    packaged = proof_file.read(PACKAGED_POLICY / proof_file.NAME)
    path = tmp_path / "proof.json"
    pair = ("torch-float32", "torch-float32")
    table = tuple(row for row in packaged.table if row.thresholds.pair == pair)
    path.write_text(packaged.model_copy(update={"table": table}).to_json())
    assert len(ProofFile.parse(path.read_bytes()).table) == 1
    recipe = demo_recipe(miner_arithmetics=("torch-float32", "torch-bfloat16"))
    with pytest.raises(ProofFileError, match=r"--validator torch-float32 --python PYTHON` with the policy.*by --proof"):
        packaged.row("vllm-bfloat16", "torch-float32")
    with pytest.raises(ProofFileError, match=r"`grailnode calibrate --miner torch-bfloat16 --validator torch-float32`"):
        workspace.create(tmp_path / "run", recipe, proof=path)
    assert not (tmp_path / "run").exists()


def test_the_founder_lists_what_the_run_admits(tmp_path: Path) -> None:
    run_directory = tmp_path / "run"
    succeed("init", str(run_directory), "--miner-arithmetic", "torch-float32", "--miner-arithmetic", "torch-bfloat16")
    proof = open_run((run_directory / "run.manifest").read_bytes()).record.proof
    assert (proof.miners, proof.validators) == (("torch-bfloat16", "torch-float32"), ("torch-float32",))
    packaged = proof_file.read(PACKAGED_POLICY / proof_file.NAME)
    lower, full = (proof.row(miner, "torch-float32") for miner in proof.miners)
    assert [lower, full] == [packaged.row(miner, "torch-float32") for miner in proof.miners]
    assert lower.margin.beyond[-1] > 10 * full.margin.beyond[-1]
    step = bisect_left(lower.margin.beyond, full.margin.beyond[-1])  # what full precision hardly ever reaches
    assert lower.margin.rates[step] > 10**9 * full.margin.rates[-1]


def test_a_recipes_engine_decides_what_its_run_admits(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[engine]\ndtype = "bfloat16"\n')
    succeed("init", str(tmp_path / "run"), "--recipe", str(recipe))
    proof = open_run((tmp_path / "run" / "run.manifest").read_bytes()).record.proof
    assert (proof.miners, proof.validators) == (("torch-bfloat16",), ("torch-bfloat16",))


# `grailnode init --numerics exact`, and engines that do not compute the bits of such a run


@pytest.mark.parametrize("role", ["miner", "validator"])
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((BFLOAT16,), r'numerics are exact.*engine\.dtype = "float32"'),
        (VLLM, r'numerics are exact.*engine\.dtype = "float32".*compute capability 8\.0'),
        (("engine.draft='int8'",), r"^engine\.draft: .*exact, and its engines do not draft$"),
    ],
    ids=str,
)
def test_another_engine_is_refused_at_the_start_in_one_line(
    tmp_path: Path, role: str, overrides: tuple[str, ...], message: str
) -> None:
    config = open_config(str(workspace.create(tmp_path, demo_recipe(numerics="exact")).config), overrides)
    with pytest.raises(UserError, match=message) as error_info:
        check_start(config, role, "validator" if role == "validator" else "miner-1", print)  # type: ignore[arg-type]
    assert "\n" not in str(error_info.value)


def test_a_policy_that_exact_arithmetic_does_not_cover_is_refused() -> None:
    policy = Policy.load(PACKAGED_POLICY)
    with pytest.raises(PolicyError, match="cover plain Qwen3, and this is 'qwen2'"):
        build_exact(replace(policy, config={**policy.config, "model_type": "qwen2"}))


@pytest.mark.parametrize(
    ("rules", "proof", "error"),
    [
        ({"miner_arithmetics": ("torch-float32",)}, None, "drop --miner-arithmetic"),
        ({"top_k": 5}, None, "without --top-k"),
        ({"lora_rank": 4, "lora_targets": "q_proj"}, None, "does not cover adapters"),
        ({}, Path("proof.json"), "no measured thresholds"),
    ],
)
def test_what_an_exact_run_cannot_have_is_refused(
    tmp_path: Path, rules: dict[str, Any], proof: Path | None, error: str
) -> None:
    with pytest.raises(UserError, match=error):
        workspace.create(tmp_path, demo_recipe(numerics="exact", **rules), proof=proof)
    assert not list(tmp_path.iterdir())
