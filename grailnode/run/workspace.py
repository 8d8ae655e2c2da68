"""A run's directory on one machine: run.toml, the signed manifest, keys, store, state, logs."""

import secrets
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from grailnode import UserError
from grailnode.beacon.relays import CHAINS, rounds_of
from grailnode.calibration import proof_file
from grailnode.config import TrainerSection
from grailnode.engine.lora_model import adapter_files
from grailnode.engine.models import check_model, file_shapes
from grailnode.engine.policy import PACKAGED_POLICY, Policy
from grailnode.environments import registry
from grailnode.run import creation, key_files, requirements, run_toml
from grailnode.run.base_files import start_lora
from grailnode.run.buckets import Bucket
from grailnode.run.files import NewFiles
from grailnode.run.rules import MAX_TITLE, Rules
from grailnode.run.run_toml import Recipe
from protocol.beacon import ChainInfo, LocalKey
from protocol.environments.dataset import Dataset
from protocol.errors import SignatureError
from protocol.identity.signing import SigningKey, check_public_key
from protocol.quantization import is_matrix
from protocol.rollout.challenge import stream

MINERS = ("miner-1", "miner-2")
ROUND_WINDOWS: Final = 2
"""Windows of a round of sites."""
_LOCAL_STEPS: Final = 4  # of a site in such a round

WHEELS: Final = "wheels"
"""The directory beside run.toml with the wheels of a plug-in."""

ADAPTERS: Final = "adapters"
"""The directory beside run.toml with the adapters of version 0, for a LoRA run."""

_LORA_RATE_FACTOR: Final = 30  # the learning rate of adapters, a multiple of that of all weights (docs/guide/train.md)
_OWN_WINDOW_SECONDS: Final = 2.0  # of a run with a beacon of its own, on one machine
_PUBLIC_WINDOW_SECONDS: Final = 60.0
_UPLOAD_SHARE: Final = 0.2  # of a round: the time for the uploads of the sites
_RATE_DIVISOR: Final = 3.5  # of a site's learning rate: the outer momentum makes 7 steps of each


@dataclass(frozen=True)
class Workspace:
    """A new run on this machine."""

    directory: Path
    config: Path  # run.toml in the directory
    rules: Rules  # those of the run, each with a value
    run_id: bytes
    keys: dict[str, bytes]  # the public keys by name
    problems: Dataset | None  # those of the data file; None for an environment without one
    start_commands: tuple[str, ...]
    files: NewFiles
    notice: str  # what its creator should know; empty for nothing


def _role_names(rules: Rules, miners: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return the names of the run's keys by role."""
    roots = tuple(f"root-{number + 1}" for number in range(rules.roots))
    validators = tuple(f"validator-{number + 1}" for number in range(rules.validators))
    return {
        "root": ("root",) if rules.roots == 1 else roots,
        "trainer": ("trainer",),
        "worker": tuple(f"worker-{number + 1}" for number in range(rules.sites)),
        "validator": ("validator", *validators[1:]) if validators else (),
        "miner": miners,
    }


def create(
    directory: Path,
    recipe: Recipe,
    *,
    policy: Path = PACKAGED_POLICY,
    proof: Path | None = None,
    miners: tuple[str, ...] = MINERS,
    bucket: Bucket | None = None,
    seed: int | None = None,
    begin: float | None = None,
) -> Workspace:
    """Create a run.

    The data file is copied into the directory, so that the run keeps the file that its manifest names, whatever becomes
    of the original.

    Args:
        proof: the file of thresholds that were measured on the policy; None for proof.json in its directory.
        miners: the names of the miners whose keys are created.
        bucket: where the run is stored and its participants meet; None for a directory of this machine.
        seed: keys follow from it, so that a demo can be repeated; None for random ones.
        begin: when window 0 opens, seconds since the Unix epoch; None for now.

    Raises:
        UserError: there is a run already, no proof, or the rules cannot be used.
    """
    config = directory / "run.toml"
    if config.exists():
        raise UserError(f"{config}: there is a run already; choose another directory")
    rules = creation.completed(recipe.rules, _title(directory), recipe.engine)
    loaded_policy = Policy.load(policy)
    task = requirements.check(rules, loaded_policy)
    lora = start_lora(loaded_policy, rules.lora_rank, rules.lora_alpha, rules.lora_targets)
    check_model(loaded_policy, None if lora is None else lora.spec)
    if rules.precision != "bf16" and not any(is_matrix(*item) for item in file_shapes(policy).items()):
        raise UserError(
            f"{policy}: this policy has no matrices in layers whose names docs/spec/quantized.md knows; drop "
            f"--precision {rules.precision}"
        )
    thresholds = _thresholds(rules, policy, proof)
    remote_validators = _validator_keys(rules.validator_keys)
    names = _role_names(rules, miners)
    seeds = {name: _secret(name, seed) for own in names.values() for name in own}
    signing = {name: SigningKey(secret) for name, secret in seeds.items()}
    public = {name: key.public for name, key in signing.items()}
    moment = time.time() if begin is None else begin
    public_chain = CHAINS.get(rules.beacon)
    if public_chain is None:
        seeds["beacon"] = _secret("beacon", seed)
        period_ms = round((rules.window or _OWN_WINDOW_SECONDS) * 1000 / rules.rounds)
        if not period_ms:
            raise UserError(f"{rules.rounds} rounds in a window of this length: lower rounds, or raise --window")
        chain, first_round = LocalKey.from_seed(seeds["beacon"]).chain(period_ms, int(moment * 1000)), 1
    else:
        chain, first_round = public_chain, public_chain.round_at(moment) + 1
        rules = _in_rounds_of(rules, chain)
    authority = creation.first_authority(
        rules,
        roots=[public[name] for name in names["root"]],
        trainers=[public["trainer"]],
        validators=[*(public[name] for name in names["validator"]), *remote_validators],
        workers=[public[name] for name in names["worker"]],
    )
    manifest = creation.draft_manifest(
        *(rules, policy, chain, authority, thresholds, task.chat, lora),
        environment=task.members,
        difficulty=task.difficulty if rules.difficulty else None,
        first_round=first_round,
    )
    signers = [signing[name] for name in names["root"][: rules.root_threshold]]
    run = creation.sign_manifest(manifest, *signers)
    start_commands = tuple(  # the first node of a role has the name that is the default
        f"grailnode --role {role:<9} --run {shlex.quote(str(config))}" + (f" --name {name}" if number else "")
        for role in ("trainer", "worker", "validator", "miner")
        for number, name in enumerate(names[role])
    )
    values = _values(run.digest, rules, policy, recipe, chain.period_ms * rules.rounds / 1000)
    text = run_toml.for_new_run(values, start_commands, bucket, public_chain)
    with NewFiles() as files:  # nothing is written before everything else has succeeded
        for name, secret in seeds.items():
            files.create_key(directory / "keys" / f"{name}{key_files.SUFFIX}", secret)
        files.write(directory / "run.manifest", run.data)
        if rules.data is not None:
            files.write(directory / requirements.DATA, rules.data.read_bytes())
        for wheel in task.wheels:
            files.write(directory / WHEELS / requirements.wheel_name(wheel.ref), wheel.data)
        if lora is not None:
            for name, data in adapter_files(lora.spec, lora.adapters).items():
                files.write(directory / ADAPTERS / name, data)
        files.write(config, text.encode())
    return Workspace(directory, config, rules, run.digest, public, task.problems, start_commands, files, task.notice)


def _title(directory: Path) -> str:
    """Return the directory's name, without what a manifest cannot have in it."""
    name = directory.resolve().name
    return "".join(character for character in name if character.isprintable())[:MAX_TITLE] or "run"


def _validator_keys(texts: tuple[str, ...]) -> tuple[bytes, ...]:
    """Return the public keys of validators whose secret keys other people hold."""
    keys: list[bytes] = []
    for text in texts:
        try:
            key = bytes.fromhex(text)
            check_public_key(key)
        except (ValueError, SignatureError):
            raise UserError(f"--validator {text}: not a public key (64 hexadecimal digits)") from None
        if key in keys:
            raise UserError(f"--validator {text}: named twice")
        keys.append(key)
    return tuple(keys)


def _in_rounds_of(rules: Rules, chain: ChainInfo) -> Rules:
    try:
        return rules.in_rounds(rounds_of(chain, rules.window or _PUBLIC_WINDOW_SECONDS))
    except ValueError as error:
        raise UserError(f"{error}; raise --window") from None


def _values(run_id: bytes, rules: Rules, policy: Path, recipe: Recipe, window_seconds: float) -> run_toml.Sections:
    """Return the values of run.toml that are no defaults: the recipe's, or those that follow from the rules."""
    sections: run_toml.Sections = recipe.model_dump(mode="json", exclude={"rules"}, exclude_unset=True)
    trainer, default = dict(sections.get("trainer", {})), TrainerSection()
    if rules.lora_rank:
        trainer.setdefault("learning_rate", default.learning_rate * _LORA_RATE_FACTOR)
    if rules.sites:  # they share the groups of a window
        trainer.setdefault("learning_rate", default.learning_rate / _RATE_DIVISOR)
        trainer.setdefault("groups_per_step", max(1, default.groups_per_step // rules.sites))
        upload_seconds, outer = round(_UPLOAD_SHARE * ROUND_WINDOWS * window_seconds, 3), trainer.get("outer", {})
        assert isinstance(outer, Mapping)
        own = {"local_steps": _LOCAL_STEPS, "round_windows": ROUND_WINDOWS, "upload_seconds": upload_seconds}
        trainer["outer"] = {**own, **outer}
    trainer["data"] = requirements.DATA if rules.data is not None else None
    names = registry.parse_mixture(rules.environment)
    trainer["wheels"] = None if all(map(registry.is_built_in, names)) else WHEELS
    trainer["adapters"] = ADAPTERS if rules.lora_rank else None
    if policy != PACKAGED_POLICY:
        trainer["policy"] = str(policy.absolute())
    return {**sections, "run": {"id": run_id.hex()}, "trainer": trainer}


def _thresholds(rules: Rules, policy: Path, proof: Path | None) -> proof_file.ProofFile | None:
    """Return the measured thresholds; None for an exact run, which has none."""
    if rules.numerics != "calibrated":
        if proof is not None:
            raise UserError(f"--proof {proof}: an exact run tolerates nothing, so that it has no measured thresholds")
        return None
    path = proof or policy / proof_file.NAME
    if proof is None and not path.is_file():
        raise UserError(
            f"{path}: not there, and thresholds are measured, not guessed: run `grailnode calibrate --policy {policy}` "
            "first"
        )
    return proof_file.read(path)


def _secret(name: str, seed: int | None) -> bytes:
    if seed is None:
        return secrets.token_bytes(32)
    return stream(seed.to_bytes(8, "little", signed=True), f"demo key {name}", 32)
