"""The processes of a trainer, a miner or a validator, and what is checked before they start."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Literal

import torch
import trio

from grailnode.beacon.relays import RelayBeacon, StoreBeacon
from grailnode.calibration import proof_file
from grailnode.config import Config, ConfigError
from grailnode.engine.compute import exact_refusal
from grailnode.engine.policy import Policy
from grailnode.environments import registry
from grailnode.node import admission_credential, disk_check, start_checks, time_check
from grailnode.node.bodies import published_files
from grailnode.node.node_makers import make_canary, make_node, state_directory
from grailnode.node.process_launch import Kind, Launch
from grailnode.node.processes import main, main_of_rank
from grailnode.node.run_model import check_run_settings, policy_directory
from grailnode.node.stores import Storage
from grailnode.node.supervisor import ProcessSpec, Supervisor, run_until_interrupted
from grailnode.node.telemetry import NodeTelemetry
from grailnode.run import key_files, requirements
from grailnode.track.tracker import check_tracker
from protocol.errors import AdmissionError
from protocol.proof import Arithmetic, arithmetic_of
from protocol.run import RunManifest
from roles.authority_updates import refresh_authority
from roles.node.identity import Node
from roles.ports import Beacon, Clock, LineReporter

Role = Literal["trainer", "worker", "miner", "validator"]
PROCESSES: Final[Mapping[Role, tuple[Kind, ...]]] = {
    "trainer": ("training", "upload", "download"),
    "worker": ("site",),
    "miner": ("miner",),
    "validator": ("validator",),
}
"""The processes that every node of a role has; those of a trainer with sites are in `process_kinds`."""


def run_role(config: Config, role: Role, name: str, report: LineReporter) -> None:
    """Run a node until it is interrupted."""
    specs = [make_spec(Launch(config, kind, name)) for kind in process_kinds(config, role)]
    run_until_interrupted(partial(Supervisor(report).keep, specs))
    report(f"{name}: stopped")


def make_spec(launch: Launch) -> ProcessSpec:
    """Return what the supervisor keeps running: one process, or the ranks of a trainer or site on several GPUs."""
    title = f"{launch.name}/{launch.kind}"
    if launch.kind in ("training", "site") and launch.config.trainer.gpus > 1:
        return ProcessSpec(title, main_of_rank, (launch,), launch.config.trainer.gpus)
    return ProcessSpec(title, main, (launch,))


def process_kinds(config: Config, role: Role) -> tuple[Kind, ...]:
    """Return the kinds of processes of a node."""
    has_sites = role == "trainer" and config.trainer.outer is not None
    kinds: tuple[Kind, ...] = ("coordinator",) if has_sites else PROCESSES[role]
    if role == "trainer" and config.trainer.external:
        kinds = tuple(kind for kind in kinds if kind != "training")
    if role == "trainer" and config.beacon.key:
        kinds = ("beacon", *kinds)
    if role == "trainer" and config.trainer.canaries:
        kinds = (*kinds, "canary")
    if role == "trainer" and config.trainer.track is not None:
        kinds = (*kinds, "tracking")
    return kinds


def check_start(config: Config, role: Role, name: str, report: LineReporter) -> None:
    """Refuse what cannot work, before any process starts; create the key of a new miner."""
    if config.store.kind == "https":
        raise ConfigError(
            f'store.kind: a {role} writes, and "https" only reads; `grailnode init DIR --bucket NAME` shows how to set '
            "a bucket up"
        )
    path = config.at(config.node.keys) / f"{name}{key_files.SUFFIX}"
    if not path.exists():
        _create_key(path, role, report)
    _check_engine(config, role)
    state = state_directory(config, name)
    disk_check.check_disk(state, 0)
    node = make_node(config, name, NodeTelemetry(name))
    _check_run_settings(config, role, node.run)
    _check_arithmetic(config, role, node.run)
    if role in ("trainer", "worker"):
        needed_bytes = disk_check.trainer_bytes(Policy.load(policy_directory(config)), node.run.lora)
    else:
        needed_bytes = disk_check.follower_bytes(node.run, config, None)
    disk_check.check_disk(state, needed_bytes)
    trio.run(_check_store, node, config)
    authority = node.authority
    keys = {"trainer": authority.trainers, "worker": authority.workers, "validator": authority.validators}
    if role in keys and node.key.public not in keys[role]:
        granted = f", or let its founder run `grailnode keys grant {node.key.public.hex()} --role worker`"
        raise key_files.KeyFileError(
            f"{path}: not a {role} key of this run; use --name for the node whose key is"
            + (granted if role == "worker" else "")
        )
    if role == "trainer" and config.trainer.track is not None:
        check_tracker(config.trainer.track)
    if role == "trainer":
        for spec in node.run.tasks:
            registry.check_code(spec)
        requirements.files_to_publish(node.run, *published_files(config))
    if role == "trainer" and authority.workers and config.trainer.outer is None and not node.run.sites_refusal:
        raise ConfigError(
            "trainer.outer: missing, and this run has workers, whose rounds its trainer closes "
            "(docs/guide/many-trainers.md)"
        )
    if role in ("miner", "validator") or (role == "trainer" and config.trainer.canaries):
        requirements.open_sandbox(node.run)
    trio.run(_wait_for_time, config, role, name, report)  # before admissions, which expire
    if role == "miner":
        trio.run(start_checks.check_admission, node)
    if role == "trainer" and config.trainer.canaries:
        _check_canary(make_canary(config, name, NodeTelemetry(name)))


async def _check_store(node: Node, config: Config) -> None:
    await refresh_authority(node)
    storage = Storage(config, NodeTelemetry(node.name))
    await start_checks.check_space(node, storage.announced(node.space) if node.space else None)
    await start_checks.check_meeting_point(node)


async def _wait_for_time(config: Config, role: Role, name: str, report: LineReporter) -> None:
    node = make_node(config, name, NodeTelemetry(name))
    chain = node.run.beacon
    relays = Storage(config, NodeTelemetry(name)).relays(chain.chain_hash)

    def make_beacon(clock: Clock) -> Beacon:
        return RelayBeacon(relays, chain, clock) if relays else StoreBeacon(node.store, chain, clock)

    runs_beacon = role == "trainer" and bool(config.beacon.key) and not relays
    urls = [*time_check.clock_urls(config), *(relay.name for relay in relays)]
    await time_check.wait_for_time(node, None if runs_beacon else make_beacon, time_check.date_reader(urls), report)


def _create_key(path: Path, role: Role, report: LineReporter) -> None:
    if role != "miner":
        raise key_files.KeyFileError(
            f"{path}: no such key; use --name for the node whose key is here, or restore its key"
        )
    report(f"{path}: made, a new key: {key_files.read_or_create(path).public.hex()}")


def _check_engine(config: Config, role: Role) -> None:
    """Refuse an engine that cannot start; vLLM itself is checked when it has started."""
    engine = config.engine
    if engine.kind == "vllm" and role in ("miner", "validator"):
        python = config.vllm_python
        if python is not None and not python.is_file():
            raise ConfigError(f"engine.python: no interpreter at {python}; `grailnode engine install DIR` makes one")
        return
    _check_device(engine.device)
    if role in ("trainer", "worker") and config.trainer.gpus > 1:
        start_checks.check_ranks(engine.device, config.trainer.gpus)


def _check_run_settings(config: Config, role: Role, run: RunManifest) -> None:
    """Refuse settings, and a role, that cannot be used in a LoRA run or a quantized run."""
    check_run_settings(config, run, trains=role in ("trainer", "worker"))
    if role == "trainer" and config.trainer.canaries:
        check_run_settings(config, run, trains=False)  # a canary is a miner with the trainer's engine
    if role == "worker" and (refusal := run.sites_refusal):
        raise ConfigError(refusal)


def _check_arithmetic(config: Config, role: Role, run: RunManifest) -> None:
    """Refuse an engine that computes in an arithmetic that the run does not admit; a canary is a miner."""
    engine, is_canary = config.engine, role == "trainer" and bool(config.trainer.canaries)
    if run.numerics == "exact":
        refusal = exact_refusal(engine.kind, engine.device, engine.dtype)
        if refusal and role in ("miner", "validator"):
            raise ConfigError(refusal)
        if engine.draft is not None:
            raise ConfigError("engine.draft: this run's numerics are exact, and its engines do not draft")
        return
    arithmetic = arithmetic_of(engine.kind, engine.dtype)
    if (role == "miner" or is_canary) and arithmetic not in run.proof.miners:
        raise ConfigError(
            _arithmetic_refusal("miners", run.proof.miners, [(arithmetic, name) for name in run.proof.validators])
        )
    if role == "validator" and arithmetic not in run.proof.validators:
        raise ConfigError(
            _arithmetic_refusal("validators", run.proof.validators, [(name, arithmetic) for name in run.proof.miners])
        )


def _arithmetic_refusal(
    who: str, admitted: Sequence[Arithmetic], missing: Sequence[tuple[Arithmetic, Arithmetic]]
) -> str:
    """Return why a node cannot take part, and the commands that measure the missing pairs of arithmetics.

    Args:
        who: "miners" or "validators", of whom the run admits some arithmetics.
    """
    own = missing[0][who == "validators"]
    commands = " and ".join(f"`{proof_file.calibration_command(*pair)}`" for pair in missing)
    return (
        f"this run admits {who} in {', '.join(admitted)}, and this node would compute in {own}, for which it has no "
        f"thresholds: change engine.kind or engine.dtype, or join a run that admits it, whose founder measures it by "
        f"{commands}"
    )


def _check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # an unknown name, or a torch built without the device
        raise ConfigError(f"engine.device: torch cannot use {name!r} here ({str(error).splitlines()[0]})") from None


def _check_canary(node: Node) -> None:
    """Refuse to start with a canary that validators would ignore."""
    trio.run(refresh_authority, node)
    try:
        trio.run(admission_credential.check_admitted, node)
    except (AdmissionError, key_files.KeyFileError) as error:
        public = node.key.public.hex()
        raise ConfigError(
            f"trainer.canaries: this run admits by {node.authority.admission.policy}, and its canary {public} is not "
            f"admitted ({error}); run `grailnode admit {public}`, or set trainer.canaries = 0"
        ) from None
