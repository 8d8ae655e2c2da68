"""`grailnode init` for runs of adapters and of quantized weights, and the settings that such runs refuse."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grailnode import UserError
from grailnode.calibration import proof_file
from grailnode.calibration.procedure import ADAPTER_SHARE
from grailnode.calibration.proof_file import MeasuredAdapters
from grailnode.config import Config, load
from grailnode.engine.lora_model import LoraModel, read_adapters
from grailnode.engine.policy import PACKAGED_POLICY, Policy, PolicyError, load_weights
from grailnode.engine.qwen3 import Qwen3
from grailnode.library import AsyncTrainer
from grailnode.node import bodies, run_model
from grailnode.node.disk_check import follower_bytes, trainer_bytes
from grailnode.node.role_checks import check_start
from grailnode.node.run_model import check_run_settings, genesis_reader, trainer_model
from grailnode.run import key_files, workspace
from grailnode.run.creation import open_run
from grailnode.run.joining import open_config
from grailnode.store.memory import MemoryStore
from protocol.digest import digest_weights
from protocol.identity.signing import SigningKey
from protocol.quantization import quantize
from protocol.run import RunManifest
from roles.trainer.spool import SnapshotName
from roles.trainer.training_spool import TrainingSpool
from tests.support.builders.chains import equal
from tests.support.builders.policies import inline, write_policy
from tests.support.builders.recipes import demo_recipe, demo_rules
from tests.support.builders.snapshots import get_snapshot
from tests.support.processes.command_line import fail, succeed
from tests.support.simulation.network import Network

VLLM: dict[str, object] = {"kind": "vllm", "url": "http://localhost:1"}


def write_proof(path: Path, rank: int, targets: tuple[str, ...]) -> Path:
    """Write the packaged policy's thresholds as if they had been measured with adapters."""
    proof = proof_file.read(PACKAGED_POLICY / proof_file.NAME)
    adapters = MeasuredAdapters(rank=rank, alpha=2.0 * rank, targets=targets, share=ADAPTER_SHARE)
    subject = proof.subject.model_copy(update={"lora": adapters})
    path.write_text(proof.model_copy(update={"subject": subject}).to_json())
    return path


def new_run(directory: Path, *options: str) -> tuple[Config, RunManifest]:
    succeed("init", str(directory), *options)
    return load(directory), open_run((directory / "run.manifest").read_bytes()).record


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, RunManifest]:
    directory = tmp_path_factory.mktemp("run") / "run"
    proof = write_proof(directory.parent / "proof.json", 8, ("q_proj", "v_proj"))
    return new_run(directory, "--lora-rank", "8", "--lora-targets", "v_proj,q_proj", "--proof", str(proof))


@pytest.fixture(scope="module")
def quantized_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, RunManifest]:
    return new_run(tmp_path_factory.mktemp("quantized") / "run", "--precision", "fp8")


def test_the_manifest_pins_the_base_and_the_first_adapters(run: tuple[Config, RunManifest]) -> None:
    config, manifest = run
    assert manifest.lora is not None
    assert (manifest.lora.rank, manifest.lora.alpha, manifest.lora.targets) == (8, 16.0, ("q_proj", "v_proj"))
    assert manifest.lora.base == digest_weights(load_weights(PACKAGED_POLICY))
    adapters = read_adapters(config.at("adapters"))
    assert manifest.model.genesis == digest_weights(adapters)
    assert digest_weights(genesis_reader(config, manifest, PACKAGED_POLICY)()) == manifest.model.genesis
    model = trainer_model(config, manifest, PACKAGED_POLICY)
    assert isinstance(model, LoraModel)
    assert {name: tuple(tensor.shape) for name, tensor in adapters.items()} == model.shapes


def test_a_trainers_disk_has_adapters_and_a_followers_has_the_base(run: tuple[Config, RunManifest]) -> None:
    config, manifest = run
    policy = Policy.load(PACKAGED_POLICY)
    assert trainer_bytes(policy, manifest.lora) < trainer_bytes(policy) - 30 * 600_000
    assert manifest.lora is not None
    without = follower_bytes(manifest.model_copy(update={"lora": None}), config, policy)
    assert follower_bytes(manifest, config, policy) == without + manifest.lora.base_bytes


async def test_a_program_publishes_adapters_as_a_directory_or_by_name(run: tuple[Config, RunManifest]) -> None:
    config, manifest = run
    node = replace(Network(demo_rules()).node("trainer"), run=manifest, state=MemoryStore(), run_sync=inline)
    trainer, adapters = AsyncTrainer(node, TrainingSpool(node, 1), config), read_adapters(config.at("adapters"))
    sources: list[Any] = [config.at("adapters"), adapters]
    for version, weights in enumerate(sources):
        assert await trainer.publish(weights, step=1) == version
        assert equal(await get_snapshot(node.state, SnapshotName(version, 1)), adapters)
    with pytest.raises(UserError, match="missing from the weights"):
        await trainer.publish(load_weights(PACKAGED_POLICY), step=2)


@pytest.mark.parametrize("is_large", [False, True])
def test_activations_are_recomputed_for_a_large_base_unless_run_toml_says_otherwise(
    run: tuple[Config, RunManifest], is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts that resolve alike have the same terms."""
    config, manifest = run
    parameters = sum(tensor.numel() for tensor in load_weights(PACKAGED_POLICY).values())
    monkeypatch.setattr(run_model, "LARGE_MODEL", parameters + (not is_large))
    terms = {}
    for chosen in (None, False, True):
        own = with_settings(config, "trainer", {"recompute": chosen})
        model = trainer_model(own, manifest, PACKAGED_POLICY)
        assert isinstance(model, LoraModel)
        assert isinstance(model._model, Qwen3)
        assert model._model._recompute == (is_large if chosen is None else chosen)
        terms[chosen] = bodies._terms(own, bytes(32), bodies._torch_compute(model, own))
    assert terms[None] == terms[is_large] != terms[not is_large]


def test_another_policy_is_not_the_base(run: tuple[Config, RunManifest], tmp_path: Path) -> None:
    config, manifest = run
    with pytest.raises(PolicyError, match="this run's adapters are for the base df1107d62568293b"):
        trainer_model(config, manifest, write_policy(tmp_path / "policy").directory)


def test_the_manifest_pins_the_precision_and_the_quantized_genesis(quantized_run: tuple[Config, RunManifest]) -> None:
    config, manifest = quantized_run
    assert manifest.precision == "fp8"
    weights = genesis_reader(config, manifest, PACKAGED_POLICY)()
    assert digest_weights(weights) == digest_weights(load_weights(PACKAGED_POLICY)) != manifest.model.genesis
    assert digest_weights(quantize(weights, "fp8")) == manifest.model.genesis


def with_settings(config: Config, section: str, changes: dict[str, object]) -> Config:
    values = config.model_dump()
    values[section] |= changes
    return Config.model_validate(values)


@pytest.mark.parametrize(
    ("kind", "section", "changes", "trains", "message"),
    [
        ("run", "engine", VLLM, False, "engine.url: .* a node starts vLLM itself"),
        ("run", "trainer", {"adapters": None}, True, "trainer.adapters: missing"),
        ("run", "trainer", {"outer": {}}, True, "trainer.outer: .* sites train all weights"),
        ("quantized_run", "trainer", {"outer": {}}, True, "trainer.outer: .* sites train BF16 weights"),
    ],
)
def test_settings_that_do_not_go_with_adapters_or_quantized_weights_are_refused(
    request: pytest.FixtureRequest, kind: str, section: str, changes: dict[str, object], trains: bool, message: str
) -> None:
    config, manifest = request.getfixturevalue(kind)
    changed = with_settings(config, section, changes)
    with pytest.raises(UserError, match=message):
        check_run_settings(changed, manifest, trains=trains)
    check_run_settings(changed, manifest.model_copy(update={"lora": None, "precision": "bf16"}), trains=trains)
    check_run_settings(config, manifest, trains=trains)


@pytest.fixture(scope="module", params=["adapters", "codes"])
def local_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return run.toml of a new run of adapters or of codes on this machine."""
    directory = tmp_path_factory.mktemp("local")
    if request.param == "codes":
        return workspace.create(directory / "run", demo_recipe(precision="int8")).config
    proof = write_proof(directory / "proof.json", 8, ("v_proj",))
    recipe = demo_recipe(lora_rank=8, lora_targets=("v_proj",))
    return workspace.create(directory / "run", recipe, proof=proof).config


@pytest.mark.parametrize("local_run", ["adapters"], indirect=True)
def test_a_canary_that_vllm_would_serve_is_refused_at_the_trainers_start(local_run: Path) -> None:
    settings = ("trainer.canaries=1", "engine.kind='vllm'", "engine.url='http://127.0.0.1:1'")
    with pytest.raises(UserError, match=r"engine\.url: in a run of LoRA adapters"):
        check_start(open_config(str(local_run), settings), "trainer", "trainer", print)


def test_a_site_is_refused_by_name_and_its_key_gets_no_role(local_run: Path) -> None:
    message = "sites train (all|BF16) weights"
    key_files.create(local_run.parent / "keys" / "worker-1.key")
    with pytest.raises(UserError, match=message):
        check_start(open_config(str(local_run)), "worker", "worker-1", print)
    key = SigningKey(bytes([77]) * 32).public.hex()
    assert re.search(message, fail("keys", "grant", key, "--role", "worker", "--run", str(local_run)))


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"lora_targets": ("q_proj",), "trainers": 2}, UserError, "of several sites trains all weights"),
        ({"lora_targets": ("q proj",)}, PolicyError, "--lora-targets: String should match"),
        ({"lora_targets": ()}, UserError, "lora_rank and lora_targets go together"),
        ({"lora_targets": ("q_proj",), "lora_rank": 2000}, UserError, "lora_rank: input should be less"),
        ({"lora_targets": ("v_proj",), "lora_rank": 65}, PolicyError, "rank 65 is more than model.layers.0"),
        ({"lora_targets": ("lm_head",)}, PolicyError, "'lm_head' is no linear module"),
        ({"lora_rank": 0, "precision": "fp8", "trainers": 2}, UserError, "several sites trains all weights, in BF16"),
        (
            {"lora_targets": ("q_proj",), "precision": "fp8"},
            UserError,
            "for runs that train all weights: drop lora_rank",
        ),
    ],
    ids=["sites", "name", "none", "rank", "dimension", "head", "sites of codes", "adapters of codes"],
)
def test_a_run_that_cannot_be_is_refused_before_anything_is_written(
    rules: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        workspace.create(tmp_path / "run", demo_recipe(**{"lora_rank": 8, **rules}))
    assert not (tmp_path / "run").exists()
