"""A run's directory on one machine: run.toml, the signed manifest, keys, store, state, logs."""

import secrets
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pydantic import ValidationError

from grailnode import UserError
from grailnode.calibration import proof_file
from grailnode.engine.adapter_files import adapter_files
from grailnode.engine.model_check import check_model, file_shapes
from grailnode.engine.policy import PACKAGED_POLICY, Policy
from grailnode.run import creation, key_files, requirements, run_toml
from grailnode.run.base_files import LoraStart, start_lora
from grailnode.run.buckets import Bucket
from grailnode.run.creation import Choices
from grailnode.run.files import NewFiles
from protocol.beacon import ChainInfo, LocalKey
from protocol.environments.dataset import Dataset
from protocol.identity.signing import SigningKey
from protocol.quantization import is_matrix
from protocol.rollout.challenge import stream

MINERS = ("miner-1", "miner-2")
ROUND_WINDOWS: Final = 2
"""Windows of a round of sites."""

ADAPTERS: Final = "adapters"
"""The directory beside run.toml with the adapters of version 0, for a LoRA run."""

_LORA_RATE_FACTOR: Final = 30  # the learning rate of adapters, a multiple of that of all weights (docs/guide/train.md)
_UPLOAD_SHARE: Final = 0.2  # of a round: the time for the uploads of the sites
_RATE_DIVISOR: Final = 3.5  # of a site's learning rate: the outer momentum makes 7 steps of each


@dataclass(frozen=True)
class Pace:
    """How fast a run on one machine goes, and how it learns. The defaults are the demo's: bench/learning.py found them.

    Attributes:
        period_ms: of the beacon; choices.rounds of these make a window.
    """

    period_ms: int = 250
    learning_rate: float = 7e-6
    warmup_steps: int = 10
    groups_per_step: int = 16
    steps_per_version: int = 1
    max_uses: int = 1
    decay: float = 0.7
    max_staleness: int = 16
    anchor_interval: int = 25
    groups: int = 16
    evaluate: bool = True

    def sections(self) -> run_toml.Sections:
        """Return the values as the sections of run.toml have them."""
        trainer = ("learning_rate", "warmup_steps", "groups_per_step", "steps_per_version", "max_uses", "decay")
        return {
            "trainer": {name: getattr(self, name) for name in (*trainer, "max_staleness", "anchor_interval")},
            "miner": {"groups": self.groups},
            "validator": {"evaluate": self.evaluate},
        }


@dataclass(frozen=True)
class Workspace:
    """A new run on this machine.

    Attributes:
        config: run.toml in the directory.
        keys: the public keys by name.
        problems: those of the data file; None for an environment without one.
        start_commands: the commands that start the run's nodes.
        files: the files that were written.
    """

    directory: Path
    config: Path
    run_id: bytes
    keys: dict[str, bytes]
    problems: Dataset | None
    start_commands: tuple[str, ...]
    files: NewFiles


class WorkspaceError(UserError):
    """A run that cannot be created here: says why, and what to do."""


@dataclass(frozen=True)
class _Names:
    """The names of the keys of a new run, by role."""

    roots: tuple[str, ...]
    validators: tuple[str, ...]
    workers: tuple[str, ...]
    miners: tuple[str, ...]

    @classmethod
    def of(cls, choices: Choices, miners: tuple[str, ...]) -> "_Names":
        roots = tuple(f"root-{number + 1}" for number in range(choices.roots))
        validators = tuple(f"validator-{number + 1}" for number in range(choices.validators))
        return cls(
            roots=("root",) if choices.roots == 1 else roots,
            validators=("validator", *validators[1:]) if validators else (),
            workers=tuple(f"worker-{number + 1}" for number in range(choices.sites)),
            miners=miners,
        )

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.roots, "trainer", *self.workers, *self.validators, *self.miners)

    def start_commands(self, config: Path) -> tuple[str, ...]:
        """Return the commands that start the nodes; the first node of a role has the name that is the default."""
        nodes = [("trainer", "")]
        for role, names in (("worker", self.workers), ("validator", self.validators), ("miner", self.miners)):
            nodes += [(role, f" --name {name}" if number else "") for number, name in enumerate(names)]
        run = shlex.quote(str(config))
        return tuple(f"grailnode --role {role:<9} --run {run}{name}" for role, name in nodes)


def create(
    directory: Path,
    choices: Choices,
    pace: Pace,
    *,
    policy: Path = PACKAGED_POLICY,
    proof: Path | None = None,
    miners: tuple[str, ...] = MINERS,
    beacon: ChainInfo | None = None,
    bucket: Bucket | None = None,
    seed: int | None = None,
    begin: float | None = None,
    sections: run_toml.Sections = MappingProxyType({}),
) -> Workspace:
    """Create a run.

    The data file is copied into the directory, so that the run keeps the file that its manifest names, whatever becomes
    of the original.

    Args:
        proof: the file of thresholds that were measured on the policy; None for proof.json in its directory.
        miners: the names of the miners whose keys are created.
        beacon: the public chain whose rounds set the pace of the windows; None for a beacon of the run's own.
        bucket: where the run is stored and its participants meet; None for a directory of this machine.
        seed: keys follow from it, so that a demo can be repeated; None for random ones.
        begin: when window 0 opens, seconds since the Unix epoch; None for now.
        sections: values for run.toml, by section and key, instead of the defaults.

    Raises:
        WorkspaceError: there is a run already, or no proof.
        ProofFileError: the proof cannot be used, or was measured on another policy.
        PolicyError, RequirementError, ChatTemplateError, KeyFileError, OSError: the policy, the data file or the
            directory cannot be used.
    """
    config = directory / "run.toml"
    if config.exists():
        raise WorkspaceError(f"{config}: there is a run already; choose another directory")
    loaded_policy = Policy.load(policy)
    task = requirements.check(
        choices.environment, choices.data, loaded_policy, choices.max_tokens, system=choices.system
    )
    lora = _start_lora(loaded_policy, choices)
    check_model(loaded_policy, None if lora is None else lora.spec)
    if choices.precision != "bf16":
        _check_precision(loaded_policy, choices)
    thresholds = _thresholds(choices, policy, proof)
    names = _Names.of(choices, miners)
    seeds = {name: _secret(name, seed) for name in names.all}
    signing = {name: SigningKey(secret) for name, secret in seeds.items()}
    public = {name: key.public for name, key in signing.items()}
    moment = time.time() if begin is None else begin
    if beacon is None:
        seeds["beacon"] = _secret("beacon", seed)
        chain = LocalKey.from_seed(seeds["beacon"]).chain(pace.period_ms, int(moment * 1000))
    else:
        chain = beacon
        choices = replace(choices, first_round=chain.round_at(moment) + 1)
    authority = creation.first_authority(
        choices,
        roots=[public[name] for name in names.roots],
        trainers=[public["trainer"]],
        validators=[*(public[name] for name in names.validators), *choices.remote_validators],
        workers=[public[name] for name in names.workers],
    )
    manifest = creation.draft_manifest(choices, policy, chain, authority, thresholds, task.chat, lora)
    signers = [signing[name] for name in names.roots[: choices.root_threshold]]
    run = creation.sign_manifest(manifest, *signers)
    start_commands = names.start_commands(config)
    defaults = _defaults(choices, pace, chain.period_ms * choices.rounds / 1000)
    values = _values(run.digest, choices, policy, defaults, sections)
    text = run_toml.for_new_run(values, start_commands, bucket, beacon, has_sites=choices.sites > 0)
    with NewFiles() as files:  # nothing is written before everything else has succeeded
        for name, secret in seeds.items():
            files.create_key(directory / "keys" / f"{name}{key_files.SUFFIX}", secret)
        files.write(directory / "run.manifest", run.data)
        if choices.data is not None:
            files.write(directory / requirements.DATA, choices.data.read_bytes())
        if lora is not None:
            for name, data in adapter_files(lora.spec, lora.adapters).items():
                files.write(directory / ADAPTERS / name, data)
        files.write(config, text.encode())
    return Workspace(directory, config, run.digest, public, task.problems, start_commands, files)


def _start_lora(policy: Policy, choices: Choices) -> LoraStart | None:
    """Return what a LoRA run begins with; None for a run that trains all weights.

    Raises:
        WorkspaceError, PolicyError: the choices cannot be used with this policy.
    """
    if choices.lora_rank and choices.sites:
        raise WorkspaceError(
            "a run of several sites trains all weights: pseudo-gradients of adapters were never tried; drop "
            "--lora-rank, or --trainers"
        )
    if choices.lora_rank and choices.numerics == "exact":
        raise WorkspaceError(
            "an exact run trains all weights: exact arithmetic does not cover adapters; drop --lora-rank or --numerics"
        )
    try:
        return start_lora(policy, choices.lora_rank, choices.lora_alpha, choices.lora_targets)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise WorkspaceError(f"--lora-{first['loc'][0]}: {first['msg']}") from error


def _check_precision(policy: Policy, choices: Choices) -> None:
    """Refuse a quantized run that cannot be.

    Raises:
        WorkspaceError: the choices, or the policy, do not allow it.
    """
    if choices.sites:
        raise WorkspaceError(
            "a run of several sites trains BF16 weights: pseudo-gradients of quantized ones were never tried; drop "
            f"--precision {choices.precision}, or --trainers"
        )
    if choices.lora_rank:
        raise WorkspaceError(
            "a run of adapters has BF16 weights: adapters are small, and were never quantized; drop "
            f"--precision {choices.precision}, or --lora-rank"
        )
    if not any(is_matrix(name, shape) for name, shape in file_shapes(policy.directory).items()):
        raise WorkspaceError(
            f"{policy.directory}: this policy has no matrices in layers whose names docs/spec/quantized.md knows; drop "
            f"--precision {choices.precision}"
        )


def _defaults(choices: Choices, pace: Pace, window_seconds: float) -> run_toml.Sections:
    """Return the values of run.toml that follow from pace and choices; sites share the groups of a window."""
    if choices.lora_rank:
        pace = replace(pace, learning_rate=pace.learning_rate * _LORA_RATE_FACTOR)
    if not choices.sites:
        return pace.sections()
    groups_per_step = max(1, pace.groups_per_step // choices.sites)
    rate = pace.learning_rate / _RATE_DIVISOR
    sections = replace(pace, groups_per_step=groups_per_step, learning_rate=rate).sections()
    upload_seconds = round(_UPLOAD_SHARE * ROUND_WINDOWS * window_seconds, 3)
    outer: dict[str, str | int | float] = {"round_windows": ROUND_WINDOWS, "upload_seconds": upload_seconds}
    return {**sections, "trainer": {**sections["trainer"], "outer": outer}}


def _values(
    run_id: bytes, choices: Choices, policy: Path, defaults: run_toml.Sections, sections: run_toml.Sections
) -> run_toml.Sections:
    """Return the values of run.toml.

    Args:
        sections: in place of the defaults.
    """
    values = {section: dict(keys) for section, keys in defaults.items()}
    for section, keys in sections.items():
        values[section] = _merged(values.get(section, {}), keys)
    values["run"] = {"id": run_id.hex()}
    values["trainer"]["data"] = requirements.DATA if choices.data is not None else None
    values["trainer"]["adapters"] = ADAPTERS if choices.lora_rank else None
    if policy != PACKAGED_POLICY:
        values["trainer"]["policy"] = str(policy.absolute())
    return values


def _merged(values: Mapping[str, run_toml.Value], others: Mapping[str, run_toml.Value]) -> dict[str, run_toml.Value]:
    """Return values by key, those of `others` first; the keys of a section in both are merged likewise."""
    merged = {**values, **others}
    for key, other in others.items():
        value = values.get(key)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            merged[key] = {**value, **other}
    return merged


def _thresholds(choices: Choices, policy: Path, proof: Path | None) -> proof_file.ProofFile | None:
    """Return the measured thresholds; None for an exact run, which has none."""
    if choices.numerics == "calibrated":
        return proof_file.read(_proof_of(policy) if proof is None else proof)
    if proof is not None:
        raise WorkspaceError(f"--proof {proof}: an exact run tolerates nothing, so that it has no measured thresholds")
    if choices.top_k or choices.top_p < 1.0 or choices.min_p:
        raise WorkspaceError("--numerics exact: without --top-k, --top-p and --min-p, whose sums are not exact")
    return None


def _proof_of(policy: Path) -> Path:
    path = policy / proof_file.NAME
    if not path.is_file():
        raise WorkspaceError(
            f"{path}: not there, and thresholds are measured, not guessed: run `grailnode calibrate --policy {policy}` "
            "first"
        )
    return path


def _secret(name: str, seed: int | None) -> bytes:
    if seed is None:
        return secrets.token_bytes(32)
    return stream(seed.to_bytes(8, "little", signed=True), f"demo key {name}", 32)
