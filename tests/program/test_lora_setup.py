"""`grailnode init` for a run of adapters, and the settings that such a run refuses."""

import tomllib
from pathlib import Path

import pytest

from grailnode.calibration import proof_file
from grailnode.calibration.adapters import ADAPTER_SHARE
from grailnode.calibration.proof_file import MeasuredAdapters
from grailnode.config import Config, ConfigError, load
from grailnode.engine.adapter_files import read_adapters
from grailnode.engine.lora_model import LoraModel
from grailnode.engine.policy import PACKAGED_POLICY, Policy, PolicyError, load_weights
from grailnode.node.disk_check import follower_bytes, trainer_bytes
from grailnode.node.run_model import check_lora, genesis_reader, trainer_model
from grailnode.run import workspace
from grailnode.run.creation import Choices, open_run
from grailnode.run.recipe import read_recipe
from grailnode.run.workspace import WorkspaceError
from protocol.digest import digest_weights
from protocol.run import RunManifest
from tests.program.start_refusals import check_canary_is_refused, check_site_is_refused
from tests.support.builders.policies import write_policy
from tests.support.processes.command_line import run_command

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "qwen2.5-7b-math-lora.toml"


def write_proof(path: Path, rank: int, targets: tuple[str, ...]) -> Path:
    """Write the packaged policy's thresholds as if they had been measured with adapters."""
    proof = proof_file.read(PACKAGED_POLICY / proof_file.NAME)
    adapters = MeasuredAdapters(rank=rank, alpha=2.0 * rank, targets=targets, share=ADAPTER_SHARE)
    subject = proof.subject.model_copy(update={"lora": adapters})
    path.write_text(proof.model_copy(update={"subject": subject}).to_json())
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, RunManifest]:
    """Return the configuration and the manifest of a new run of adapters."""
    directory = tmp_path_factory.mktemp("run") / "run"
    proof = write_proof(directory.parent / "proof.json", 8, ("q_proj", "v_proj"))
    options = ("--lora-rank", "8", "--lora-targets", "v_proj,q_proj", "--proof", str(proof))
    created = run_command("init", str(directory), *options)
    assert created.returncode == 0, created.stderr
    return load(directory), open_run((directory / "run.manifest").read_bytes()).record


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
    without = manifest.model_copy(update={"lora": None})
    assert manifest.lora is not None
    assert (
        follower_bytes(manifest, config, policy) == follower_bytes(without, config, policy) + manifest.lora.base_bytes
    )


def test_another_policy_is_not_the_base(run: tuple[Config, RunManifest], tmp_path: Path) -> None:
    config, manifest = run
    policy = write_policy(tmp_path / "policy")
    with pytest.raises(PolicyError, match="this run's adapters are for the base df1107d62568293b"):
        trainer_model(config, manifest, policy.directory)


@pytest.mark.parametrize(
    ("section", "changes", "trains", "message"),
    [
        ("engine", {"kind": "vllm", "url": "http://localhost:1"}, False, '"vllm" cannot serve this run'),
        ("trainer", {"adapters": None}, True, "trainer.adapters: missing"),
        ("trainer", {"outer": {}}, True, "trainer.outer: .* sites train all weights"),
    ],
)
def test_settings_that_do_not_go_with_adapters_are_refused(
    run: tuple[Config, RunManifest], section: str, changes: dict[str, object], trains: bool, message: str
) -> None:
    config, manifest = run
    values = config.model_dump()
    values[section] |= changes
    changed = Config.model_validate(values)
    with pytest.raises(ConfigError, match=message):
        check_lora(changed, manifest, trains=trains)
    check_lora(changed, manifest.model_copy(update={"lora": None}), trains=trains)
    check_lora(config, manifest, trains=trains)


@pytest.fixture(scope="module")
def local_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return run.toml of a new run of adapters on this machine."""
    directory, choices = tmp_path_factory.mktemp("local"), Choices(lora_rank=8, lora_targets=("v_proj",))
    proof = write_proof(directory / "proof.json", 8, ("v_proj",))
    return workspace.create(directory / "run", choices, workspace.Pace(), proof=proof).config


def test_a_canary_that_cannot_serve_adapters_is_refused_at_the_trainers_start(local_run: Path) -> None:
    check_canary_is_refused(local_run)


def test_a_site_is_refused_by_name_and_its_key_gets_no_role(local_run: Path) -> None:
    check_site_is_refused(local_run, "sites train all weights")


@pytest.mark.parametrize(
    ("choices", "error", "message"),
    [
        (
            Choices(lora_rank=8, lora_targets=("q_proj",), sites=2),
            WorkspaceError,
            "of several sites trains all weights",
        ),
        (Choices(lora_rank=8, lora_targets=("q proj",)), WorkspaceError, "--lora-targets: String should match"),
        (Choices(lora_rank=8, lora_targets=()), WorkspaceError, "--lora-targets: Tuple should have at least 1"),
        (Choices(lora_rank=2000, lora_targets=("q_proj",)), WorkspaceError, "--lora-rank: Input should be less"),
        (Choices(lora_rank=65, lora_targets=("v_proj",)), PolicyError, "rank 65 is more than model.layers.0"),
        (Choices(lora_rank=8, lora_targets=("lm_head",)), PolicyError, "'lm_head' is no linear module"),
    ],
    ids=["sites", "name", "none", "rank", "dimension", "head"],
)
def test_a_run_that_cannot_be_is_refused_before_anything_is_written(
    choices: Choices, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        workspace.create(tmp_path / "run", choices, workspace.Pace())
    assert not (tmp_path / "run").exists()


def test_rank_and_targets_go_together(tmp_path: Path) -> None:
    refused = run_command("init", str(tmp_path / "run"), "--lora-rank", "8")
    assert refused.returncode != 0
    assert refused.stderr == "grailnode: init: lora_rank and lora_targets go together\n"


def test_the_example_is_a_recipe() -> None:
    rules = read_recipe(EXAMPLE).rules
    assert (rules.lora_rank, rules.lora_alpha, len(rules.lora_targets)) == (16, 32.0, 7)
    assert tomllib.loads(EXAMPLE.read_text())["trainer"]["recompute"]
