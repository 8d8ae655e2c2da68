"""`grailnode init` for a quantized run, and the settings that such a run refuses."""

from pathlib import Path

import pytest

from grailnode.config import Config, ConfigError, load
from grailnode.engine.policy import PACKAGED_POLICY, load_weights
from grailnode.node.run_model import check_run_settings, genesis_reader
from grailnode.run import workspace
from grailnode.run.creation import Choices, open_run
from grailnode.run.workspace import WorkspaceError
from protocol.digest import digest_weights
from protocol.quantization import quantize
from protocol.run import RunManifest
from tests.program.start_refusals import check_canary_is_refused, check_site_is_refused
from tests.support.processes.command_line import run_command


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, RunManifest]:
    """Return the configuration and the manifest of a new run of FP8 weights."""
    directory = tmp_path_factory.mktemp("run") / "run"
    created = run_command("init", str(directory), "--precision", "fp8")
    assert created.returncode == 0, created.stderr
    return load(directory), open_run((directory / "run.manifest").read_bytes()).record


def test_the_manifest_pins_the_precision_and_the_quantized_genesis(run: tuple[Config, RunManifest]) -> None:
    config, manifest = run
    assert manifest.precision == "fp8"
    weights = genesis_reader(config, manifest, PACKAGED_POLICY)()
    assert digest_weights(weights) == digest_weights(load_weights(PACKAGED_POLICY)) != manifest.model.genesis
    assert digest_weights(quantize(weights, "fp8")) == manifest.model.genesis


@pytest.mark.parametrize(
    ("section", "changes", "trains", "message"),
    [
        ("engine", {"kind": "vllm", "url": "http://localhost:1"}, False, '"vllm" cannot serve this run'),
        ("trainer", {"outer": {}}, True, "trainer.outer: .* sites train BF16 weights"),
        ("trainer", {"gpus": 2}, True, "trainer.gpus: .* set it to 1"),
    ],
)
def test_settings_that_do_not_go_with_quantized_weights_are_refused(
    run: tuple[Config, RunManifest], section: str, changes: dict[str, object], trains: bool, message: str
) -> None:
    config, manifest = run
    values = config.model_dump()
    values[section] |= changes
    changed = Config.model_validate(values)
    with pytest.raises(ConfigError, match=message):
        check_run_settings(changed, manifest, trains=trains)
    check_run_settings(changed, manifest.model_copy(update={"precision": "bf16"}), trains=trains)
    check_run_settings(config, manifest, trains=trains)


@pytest.fixture(scope="module")
def local_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return run.toml of a new quantized run on this machine."""
    return workspace.create(
        tmp_path_factory.mktemp("local") / "run", Choices(precision="int8"), workspace.Pace()
    ).config


def test_a_canary_that_cannot_serve_codes_is_refused_at_the_trainers_start(local_run: Path) -> None:
    check_canary_is_refused(local_run)


def test_a_site_is_refused_by_name_and_its_key_gets_no_role(local_run: Path) -> None:
    check_site_is_refused(local_run, "sites train BF16 weights")


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (Choices(precision="fp8", sites=2), "a run of several sites trains BF16 weights"),
        (Choices(precision="fp8", lora_rank=8, lora_targets=("q_proj",)), "a run of adapters has BF16 weights"),
    ],
    ids=["sites", "adapters"],
)
def test_a_run_that_cannot_be_is_refused_before_anything_is_written(
    choices: Choices, message: str, tmp_path: Path
) -> None:
    with pytest.raises(WorkspaceError, match=message):
        workspace.create(tmp_path / "run", choices, workspace.Pace())
    assert not (tmp_path / "run").exists()


def test_adapters_and_codes_do_not_go_together(tmp_path: Path) -> None:
    refused = run_command(
        "init", str(tmp_path / "run"), "--lora-rank", "8", "--lora-targets", "q_proj", "--precision", "int8"
    )
    assert refused.returncode != 0
    assert "drop lora_rank" in refused.stderr
