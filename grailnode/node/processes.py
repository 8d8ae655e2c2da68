"""The main functions of a node's processes, and how a node is made from its configuration.

The fork server imports this module, so that a new process has every other module it needs already.
"""

import fcntl
import secrets
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Literal

import torch
import trio

from grailnode.beacon.relays import RelayBeacon, StoreBeacon, publish_rounds
from grailnode.config import Config, ConfigError
from grailnode.engine import causal_model as models
from grailnode.engine.compute import Compute
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from grailnode.node import admission_proof
from grailnode.node.canary import CanaryProducer
from grailnode.node.clock import SystemClock
from grailnode.node.metrics_server import serve_metrics
from grailnode.node.settings import miner_settings, trainer_settings, validator_settings
from grailnode.node.stores import Storage, sweep_orphans
from grailnode.node.supervisor import EXIT_PERMANENT, run_process
from grailnode.node.telemetry import NodeTelemetry
from grailnode.node.user_errors import StateInUseError, explain, is_transient
from grailnode.node.wiring import make_task, run_collector, run_miner, run_publisher, run_training, run_validator
from grailnode.observe.recheck import GroupReference, RecheckedGroup, recheck
from grailnode.run import creation, key_files, requirements
from grailnode.store.local import LocalStore
from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.beacon import LocalKey
from protocol.environments import Sandbox
from protocol.errors import error_context
from protocol.identity.authority import Revisions
from protocol.identity.signing import SigningKey
from protocol.judging.report import canary_key
from roles.node.change_reporter import ChangeReporter
from roles.node.identity import Node
from roles.policy.assignment import Task
from roles.ports import ObjectStore, StoreError

Kind = Literal["beacon", "training", "upload", "download", "canary", "miner", "validator"]
TRAINER_KINDS: tuple[Kind, ...] = ("beacon", "training", "upload", "download", "canary")
_ORPHAN_SWEEPERS: tuple[Kind, ...] = ("upload", "canary", "miner", "validator")  # one process for each space
_LOCK_SECONDS = 5.0  # longer than a killed process takes to release its lock
_RETRY_SECONDS = 0.5
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Launch:
    """What a process needs to start; picklable.

    Attributes:
        config: the node's configuration.
        kind: which of the node's processes it is.
        name: the node's name, which names its key and its state directory.
        echo: whether events also go to the terminal.
    """

    config: Config
    kind: Kind
    name: str
    echo: bool = True


ProcessBody = Callable[[Node, Launch], Awaitable[None]]
"""What a process does after its node has been made; it runs until cancelled."""


def main(launch: Launch, body: ProcessBody | None = None) -> None:
    """Run a node's process until it is stopped.

    Args:
        body: replaces the body of the process's kind; a module-level function.
    """
    torch.set_num_threads(launch.config.engine.threads)
    run_process(f"{launch.name}/{launch.kind}", partial(_run, launch, body or _BODIES[launch.kind]))


def lock_state(directory: Path, kind: str) -> IO[str]:
    """Lock a state directory for one kind of process, until the returned file is closed or the process ends.

    Raises:
        StateInUseError: another process has kept the lock for `_LOCK_SECONDS`.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = (directory / f".{kind}.lock").open("w")
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                raise StateInUseError(f"{directory}: in use by another {kind} process; use another --name") from None
            time.sleep(0.1)
        else:
            return file


async def _run(launch: Launch, body: ProcessBody) -> int:
    """Make the node, run the body of the process, and return its exit code."""
    config, kind = launch.config, launch.kind
    state = config.at(config.node.state) / launch.name
    process = f"{launch.name}/{kind}" if kind in TRAINER_KINDS else launch.name
    log = config.at(config.node.logs) / f"{process.replace('/', '-')}.jsonl"
    telemetry = NodeTelemetry.to_file(process, log, sys.stderr if launch.echo else None)
    try:
        with lock_state(state, kind):
            telemetry.event("started", kind=kind)
            make = make_canary if kind == "canary" else make_node
            node = make(config, launch.name, telemetry)
            async with trio.open_nursery() as nursery:
                if kind in _ORPHAN_SWEEPERS:
                    nursery.start_soon(sweep_orphans, config, node.key.public, telemetry, node.clock.now())
                if config.node.metrics_port:
                    nursery.start_soon(serve_metrics, metrics_port(config, kind), telemetry.metrics.exposition)
                await body(node, launch)
                nursery.cancel_scope.cancel()
    except Exception as error:
        line = explain(error)
        if line is None:
            raise  # a bug: the traceback goes to standard error, and a restart may help
        telemetry.event("failed", error=line)
        return 1 if is_transient(error) else EXIT_PERMANENT
    return 0


def metrics_port(config: Config, kind: Kind) -> int:
    """Return the port on which a process serves its metrics; a trainer's ports are consecutive, as in TRAINER_KINDS."""
    return config.node.metrics_port + (TRAINER_KINDS.index(kind) if kind in TRAINER_KINDS else 0)


def make_node(config: Config, name: str, telemetry: NodeTelemetry) -> Node:
    """Return a node of this machine, with the key and the state of its name.

    Raises:
        OSError, ProtocolError, KeyFileError, ConfigError, CredentialsError, StoreError: manifest, key, state or store
            cannot be used.
    """
    state = LocalStore(config.at(config.node.state) / name / "objects")
    return _node(config, name, _key(config, name), state, Storage(config, telemetry), telemetry)


def make_canary(config: Config, name: str, telemetry: NodeTelemetry) -> Node:
    """Return the node of a trainer's newest canary: a miner's node, with a key that only this trainer can recognize.

    When the run invites its miners, the canary's invitation is the file NAME-canary-NUMBER.invite beside the keys.

    Raises:
        OSError, ProtocolError, KeyFileError, ConfigError, CredentialsError, StoreError: as for `make_node`.
    """
    number = config.trainer.canaries - 1
    key = canary_key(_key(config, name), number)
    if config.trainer.canary_store is not None:
        config = config.model_copy(update={"store": config.trainer.canary_store})
    elif config.store.meeting is not None:
        raise ConfigError(
            "trainer.canary_store: missing; a canary needs a bucket of its own, because in the trainer's bucket "
            "everybody would recognize it"
        )
    local_name = f"{name}-canary-{number}"
    state = LocalStore(config.at(config.node.state) / local_name / "objects")
    public_name = f"node {key.public.hex()[:4]}"
    return _node(config, public_name, key, state, Storage(config, telemetry), telemetry, invitation_name=local_name)


def _key(config: Config, name: str) -> SigningKey:
    return key_files.read_or_create(config.at(config.node.keys) / f"{name}{key_files.SUFFIX}")


def make_spectator(config: Config) -> Node:
    """Return a node that only reads: its key is random and its state is in memory.

    Raises:
        OSError, ProtocolError, StoreError: manifest or store cannot be used.
    """
    telemetry = NodeTelemetry("spectator")
    storage = Storage(config, telemetry, writes=False)
    return _node(config, "spectator", SigningKey(secrets.token_bytes(32)), MemoryStore(), storage, telemetry)


def make_root_publisher(config: Config) -> Node:
    """Return a node that publishes what root keys signed: it writes, its key is random and its state is in memory.

    Raises:
        OSError, ProtocolError, ConfigError, CredentialsError, StoreError: manifest or store cannot be used.
    """
    telemetry = NodeTelemetry("root-publisher")
    key = SigningKey(secrets.token_bytes(32))
    return _node(config, "root-publisher", key, MemoryStore(), Storage(config, telemetry), telemetry)


def _node(
    config: Config,
    name: str,
    key: SigningKey,
    state: ObjectStore,
    storage: Storage,
    telemetry: NodeTelemetry,
    invitation_name: str = "",
) -> Node:
    """Return a node. Its invitation, when it needs one, is the file of `invitation_name`, or else of `name`."""
    manifest = config.at(config.run.manifest)
    with error_context(manifest):
        signed = creation.open_run(manifest.read_bytes(), bytes.fromhex(config.run.id) if config.run.id else None)
    clock = SystemClock()
    invitation = config.at(config.node.keys) / f"{invitation_name or name}{admission_proof.SUFFIX}"
    revisions = Revisions(signed.digest, signed.record.authority)
    store = storage.routed(signed.record, revisions, key.public, state, clock)
    chain = signed.record.beacon
    relays = storage.relays(chain.chain_hash)
    return Node(
        run_id=signed.digest,
        run=signed.record,
        key=key,
        name=name,
        store=store,
        state=state,
        clock=clock,
        beacon=RelayBeacon(relays, chain, clock) if relays else StoreBeacon(store, chain, clock),
        telemetry=telemetry,
        run_sync=trio.to_thread.run_sync,
        space=config.store.url if config.store.meeting is not None else "",
        proof=admission_proof.make_prover(invitation),
        shared_revisions=revisions,
    )


async def join_run(node: Node, config: Config, name: str) -> tuple[Task, Compute]:
    """Wait for the run's files in the store, and return the run's task and model.

    The sandbox, if the run needs one, is opened first: without it the node cannot take part.
    """
    sandbox = await node.run_sync(requirements.open_sandbox, node.run)
    reporter = ChangeReporter(node.telemetry, "files-missing")
    while True:
        try:
            return await _task(node, config, config.at(config.node.state) / name, sandbox)
        except StoreError as error:
            reporter.failure(error)
            await trio.sleep(_RETRY_SECONDS)


async def _task(node: Node, config: Config, directory: Path, sandbox: Sandbox | None) -> tuple[Task, Compute]:
    """Fetch the run's files into a directory, and return the run's task and model.

    Raises:
        StoreError, ProtocolError, PolicyError: a file cannot be fetched, or is not the one that the run names.
    """
    policy = await creation.fetch_model(node.store, node.run, node.authority.trainers, directory / "model")
    data = await creation.fetch_data(node.store, node.run, node.authority.trainers, directory / "data")
    return make_task(node, policy, data, sandbox), _compute(policy, config)


def _compute(policy: Policy, config: Config) -> Compute:
    engine = config.engine
    return Compute(
        models.build(policy, torch.device(engine.device)),
        device=engine.device,
        dtype=_DTYPES[engine.dtype],
        max_batch_tokens=engine.max_batch_tokens,
    )


async def publish_beacon(node: Node, launch: Launch) -> None:
    """Publish the rounds of the run's own beacon until cancelled."""
    config = launch.config
    secret = key_files.read(config.at(config.node.keys) / f"{config.beacon.key}{key_files.SUFFIX}")
    key = LocalKey.from_seed(secret)
    await publish_rounds(key, node.run.beacon, node.store, node.clock, keep=config.beacon.keep_rounds)


def policy_directory(config: Config) -> Path:
    """Return the directory of the trainer's policy of version 0: the packaged genesis, or the operator's own."""
    name = config.trainer.policy
    return PACKAGED_POLICY if name == "genesis" else config.at(Path(name))


def data_file(config: Config) -> Path | None:
    """Return the path of the trainer's data file; None when run.toml names no data file."""
    return None if config.trainer.data is None else config.at(config.trainer.data)


async def _training(node: Node, launch: Launch) -> None:
    config = launch.config
    directory = policy_directory(config)
    policy = Policy.load(directory)
    settings = trainer_settings(config, node.run.sampling.params())
    await run_training(node, partial(load_weights, directory), _compute(policy, config), settings)


async def _upload(node: Node, launch: Launch) -> None:
    config = launch.config
    data = requirements.files_to_publish(node.run, data_file(config))
    files = creation.model_files(policy_directory(config)) | data
    await creation.publish_files(node.store, node.key.public, files)
    await node.publish(paths.run(node.run_id), config.at(config.run.manifest).read_bytes())
    expiry_offset_ms = secrets.randbelow(max(1, node.run.head_ttl * 100))
    await run_publisher(
        node, replace(trainer_settings(config, node.run.sampling.params()).publisher, expiry_offset_ms=expiry_offset_ms)
    )


async def _download(node: Node, launch: Launch) -> None:
    await run_collector(node, trainer_settings(launch.config, node.run.sampling.params()).collector)


async def _miner(node: Node, launch: Launch) -> None:
    task, compute = await join_run(node, launch.config, launch.name)
    await run_miner(node, task, compute, miner_settings(launch.config))


async def _canary(node: Node, launch: Launch) -> None:
    config = launch.config
    task, compute = await join_run(node, config, f"{launch.name}-canary")
    producer = partial(CanaryProducer, trainer=_key(config, launch.name))
    await run_miner(node, task, compute, miner_settings(config), producer)


async def recheck_group(config: Config, reference: GroupReference) -> RecheckedGroup:
    """Judge one group of a run again, as anybody can.

    Raises:
        OSError, StoreError, ProtocolError, PolicyError, EngineError, SandboxError: an object, a file or the sandbox
            that this needs is missing or invalid.
    """
    node = make_spectator(config)
    sandbox = await node.run_sync(requirements.open_sandbox, node.run)
    with tempfile.TemporaryDirectory(prefix="grailnode-verify-") as directory:
        task, compute = await _task(node, config, Path(directory), sandbox)
        return await recheck(node, task, compute, reference)


async def _validator(node: Node, launch: Launch) -> None:
    task, compute = await join_run(node, launch.config, launch.name)
    await run_validator(node, task, compute, validator_settings(launch.config))


_BODIES: dict[Kind, ProcessBody] = {
    "beacon": publish_beacon,
    "training": _training,
    "upload": _upload,
    "download": _download,
    "canary": _canary,
    "miner": _miner,
    "validator": _validator,
}
