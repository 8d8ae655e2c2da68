"""run.toml: where a node's run, store, keys and state lie, and what its operator decides. Read once, passed on as values.

Every key can be overridden on the command line (`--set trainer.learning_rate=2e-5`). Secrets are never in it: keys lie in
files that only their owner can read, and storage credentials come from the environment.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grailnode.wiring import TrainerSettings
from protocol.sampling import SamplingParams
from roles.miner.node import MinerSettings
from roles.trainer.collector import CollectorSettings
from roles.trainer.learner import LearnerSettings
from roles.trainer.optimizer import AdamWSettings
from roles.trainer.publisher import PublisherSettings
from roles.trainer.replay import ReplaySettings
from roles.trainer.training import TrainingSettings
from roles.validator.node import ValidatorSettings

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class ConfigError(Exception):
    """A configuration that cannot be used: names the file, the key and the fix."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSection(_Section):
    """Which run: the signed manifest's file, and the id that it must have (empty: take the file's word)."""

    manifest: Path = Path("run.manifest")
    id: str = ""


class StoreSection(_Section):
    """The shared medium."""

    kind: Literal["local"] = "local"
    path: Path = Path("store")


class NodeSection(_Section):
    """Where this machine keeps keys (one file a name), state (one directory a name) and logs."""

    keys: Path = Path("keys")
    state: Path = Path("state")
    logs: Path = Path("logs")


class BeaconSection(_Section):
    """The local beacon that the trainer's node runs for a run on one machine; empty key: somebody else runs the beacon."""

    key: str = "beacon"
    keep_rounds: Count = 1000


class EngineSection(_Section):
    """Where the policy is computed."""

    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: Count = 1
    max_batch_tokens: Count = 8192


class TrainerSection(_Section):
    """How the trainer learns and publishes."""

    policy: str = "genesis"
    learning_rate: Positive = 7e-6
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    groups_per_step: Count = 16
    steps_per_version: Count = 1
    max_uses: Count = 1
    decay: Annotated[float, Field(gt=0, le=1)] = 0.7
    max_staleness: Annotated[int, Field(ge=0)] = 16
    replay_bytes: Count = 1 << 30
    anchor_interval: Count = 50
    keep_patches: Count = 100
    keep_anchors: Count = 10
    seed: int = 0
    poll_seconds: Positive = 0.1


class MinerSection(_Section):
    """How much a miner delivers."""

    groups: Count = 16
    chunk: Count = 8
    share: Annotated[float, Field(gt=0, le=1)] = 0.8
    poll_seconds: Positive = 0.2


class ValidatorSection(_Section):
    """What a validator does beside judging."""

    evaluation_problems: Annotated[int, Field(ge=0)] = 256
    poll_seconds: Positive = 0.2


class Config(_Section):
    """run.toml as a whole. Relative paths are relative to the file's directory."""

    run: RunSection = RunSection()
    store: StoreSection = StoreSection()
    node: NodeSection = NodeSection()
    beacon: BeaconSection = BeaconSection()
    engine: EngineSection = EngineSection()
    trainer: TrainerSection = TrainerSection()
    miner: MinerSection = MinerSection()
    validator: ValidatorSection = ValidatorSection()
    directory: Path = Path()

    def at(self, path: Path) -> Path:
        """A path of this file, made absolute."""
        return path if path.is_absolute() else self.directory / path


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read run.toml.

    Args:
        overrides: 'section.key=value', the value in TOML's notation; a bare word is a string.

    Raises:
        ConfigError: the file is missing or broken, or a key is unknown or has a value that it cannot have.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; `grailnode init DIR` writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    for override in overrides:
        _override(values, override)
    try:
        return Config.model_validate(values | {"directory": path.absolute().parent})
    except ValidationError as error:
        raise ConfigError(_explain(path, error)) from None


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise ConfigError(f"--set {override}: write --set section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    table = values.setdefault(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"--set {override}: {section} is not a section")
    table[name] = value


def _explain(path: Path, error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        section = Config.model_fields.get(str(first["loc"][0]))
        known = getattr(section.annotation, "model_fields", Config.model_fields) if section else Config.model_fields
        names = ", ".join(sorted(set(known) - {"directory"}))
        return f"{path}: unknown key {place}; known here: {names}"
    return f"{path}: {place}: {first['msg'].lower()} (it is {first['input']!r})"


def trainer_settings(config: Config, sampling: SamplingParams) -> TrainerSettings:
    """A trainer's settings, for rollouts that are sampled in this way."""
    section = config.trainer
    return TrainerSettings(
        training=TrainingSettings(section.groups_per_step, section.steps_per_version),
        learner=LearnerSettings(
            temperature=sampling.temperature,
            filters=sampling.filters,
            max_batch_tokens=config.engine.max_batch_tokens,
            optimizer=AdamWSettings(learning_rate=section.learning_rate, warmup_steps=section.warmup_steps),
        ),
        replay=ReplaySettings(section.replay_bytes, section.decay, section.max_staleness, section.max_uses),
        publisher=PublisherSettings(
            anchor_interval=section.anchor_interval,
            keep_patches=section.keep_patches,
            keep_anchors=section.keep_anchors,
        ),
        collector=CollectorSettings(poll_seconds=section.poll_seconds),
        seed=section.seed,
    )


def miner_settings(config: Config) -> MinerSettings:
    """A miner's settings."""
    section = config.miner
    return MinerSettings(section.groups, section.chunk, section.share, section.poll_seconds)


def validator_settings(config: Config) -> ValidatorSettings:
    """A validator's settings."""
    return ValidatorSettings(config.validator.evaluation_problems, config.validator.poll_seconds)
