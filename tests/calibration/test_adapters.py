"""The calibration of a LoRA run: base and adapters on both sides, copies of the merged weights, a proof of its own."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from grailnode.calibration import proof_file
from grailnode.calibration.adapters import random_adapters
from grailnode.calibration.proof_file import ProofFileError
from grailnode.calibration.thresholds import CalibrationError
from grailnode.calibration.variants import Variant
from grailnode.cli.actions.calibration_run import make_job
from grailnode.cli.main import cli
from grailnode.engine.lora_model import LoraModel, merged_weights
from grailnode.engine.models import build
from grailnode.engine.policy import Policy, PolicyError
from grailnode.engine.torch_engine import TorchEngine
from grailnode.run import workspace
from grailnode.run.base_files import LoraStart, start_lora
from grailnode.run.creation import Choices, open_run
from protocol.digest import Weights
from protocol.lora import DOWN, PREFIX, UP
from tests.calibration.options import OPTIONS
from tests.support.builders.policies import PARAMS, requests_of_many_lengths
from tests.support.simulation.network import inline

SHARE = 0.1
TARGETS = ("down_proj", "q_proj", "v_proj")
VARIANTS = {
    "qwen3": Variant(),
    "transformers": Variant(implementation="transformers"),
    "static": Variant(multiple=16),
}


@pytest.fixture(scope="module")
def start(policy: Policy) -> LoraStart:
    """Return what a run of adapters on the policy begins with."""
    start = start_lora(policy, 4, 8.0, TARGETS)
    assert start is not None
    return start


@pytest.fixture(scope="module")
def adapters(policy: Policy, weights: Weights, start: LoraStart) -> dict[str, Tensor]:
    """Return the adapters of a calibration."""
    return random_adapters(weights, build(policy, lora=start.spec).shapes, start.spec.scale, SHARE, seed=0)


def test_random_adapters_are_those_of_the_run_and_change_each_matrix_by_a_share(
    weights: Weights, start: LoraStart, adapters: Mapping[str, Tensor]
) -> None:
    assert {name: tensor.shape for name, tensor in adapters.items()} == {
        name: tensor.shape for name, tensor in start.adapters.items()
    }
    wide = {name: tensor.to(torch.float32) for name, tensor in weights.items()}
    changes = [
        float((merged - wide[name]).norm() / wide[name].norm())
        for name, merged in merged_weights(wide, adapters, start.spec.scale).items()
        if merged is not wide[name]
    ]
    assert len(changes) == len(adapters) / 2
    assert changes == pytest.approx([SHARE] * len(changes), rel=0.01)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
async def test_a_side_computes_what_a_nodes_model_of_base_and_adapters_computes(
    policy: Policy, weights: Weights, start: LoraStart, adapters: Mapping[str, Tensor], variant: Variant
) -> None:
    node = TorchEngine(LoraModel(build(policy, lora=start.spec), weights), run_sync=inline)
    await node.stage(0, adapters)
    await node.commit()
    beside = {name.removeprefix(PREFIX): tensor for name, tensor in adapters.items()}
    side = await variant.serve(policy, {**weights, **beside}, start.spec)
    params = replace(PARAMS, max_tokens=5)
    requests = requests_of_many_lengths(8)
    expected, own = await node.generate(requests, params), await side.generate(requests, params)
    without = await (await variant.serve(policy, weights)).generate(requests, params)
    for one, two, three in zip(expected, own, without, strict=True):
        assert one.tokens == two.tokens
        torch.testing.assert_close(one.hidden, two.hidden, rtol=0, atol=1e-4)
        assert variant is not VARIANTS["qwen3"] or torch.equal(one.hidden, two.hidden)
        assert three.tokens != two.tokens or not torch.allclose(three.hidden, two.hidden, rtol=0, atol=1e-3)
    assert all(name.endswith((DOWN, UP)) for name in beside)


def test_the_thresholds_of_a_run_of_adapters_are_for_that_run_alone(tmp_path: Path) -> None:
    out, options = tmp_path / "proof.json", ("--lora-rank", "4", "--lora-targets", "v_proj,q_proj")
    quick = ("--rollouts", "400", "--pairs", "same,eager-checked", "--adapter-share", "0.1", "--out", str(out))
    result = CliRunner().invoke(cli, ["calibrate", *quick, *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    measured = proof_file.read(out).subject.lora
    assert measured is not None
    assert (measured.rank, measured.alpha, measured.targets, measured.share) == (4, 8.0, ("q_proj", "v_proj"), SHARE)
    run = Choices(lora_rank=4, lora_targets=("q_proj", "v_proj"))
    workspace.create(tmp_path / "run", run, workspace.Pace(), proof=out)
    manifest = open_run((tmp_path / "run" / "run.manifest").read_bytes()).record
    assert manifest.proof.table == tuple(row.thresholds for row in proof_file.read(out).table)
    for choices, proof, message in (
        (Choices(), out, r"with adapters of rank 4.*the run computes without.*calibrate` without --lora-rank"),
        (replace(run, lora_alpha=4.0), out, "alpha 8, of q_proj, v_proj, the run computes with .* rank 4, alpha 4"),
        (run, None, "without adapters, the run .* --lora-rank 4 --lora-alpha 8 --lora-targets q_proj,v_proj"),
    ):
        with pytest.raises(ProofFileError, match=message):
            workspace.create(tmp_path / "other", choices, workspace.Pace(), proof=proof)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_rank": 4}, "--lora-rank and --lora-targets go together"),
        ({"lora_targets": "q_proj"}, "--lora-rank and --lora-targets go together"),
        ({"lora_alpha": 4.0}, "--lora-alpha belongs to adapters"),
        ({"lora_rank": 4, "lora_targets": "q proj"}, "--lora-targets: String should match"),
        ({"lora_rank": 4, "lora_targets": "q_proj", "miner": "vllm-float32"}, "vLLM serves no adapters"),
        ({"lora_rank": 65, "lora_targets": "v_proj"}, "rank 65 is more than model.layers.0"),
    ],
)
def test_adapters_that_cannot_be_are_refused(changes: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises((CalibrationError, PolicyError), match=message):
        make_job(replace(OPTIONS, **changes), tmp_path)  # type: ignore[arg-type]
