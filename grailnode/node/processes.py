"""The main functions of a node's processes.

The fork server imports this module, so that a new process has every other module it needs already.
"""

import gc
import secrets
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import trio

from grailnode.beacon.relays import publish_rounds
from grailnode.config import Config
from grailnode.engine.compute import Compute
from grailnode.engine.models import build_exact
from grailnode.engine.policy import Policy
from grailnode.node.allocator import return_large_blocks
from grailnode.node.canary import CanaryProducer
from grailnode.node.disk_check import check_disk, follower_bytes
from grailnode.node.loop_watch import LONG_STEP_SECONDS, LoopWatch, StepReporter
from grailnode.node.metrics_server import serve_metrics
from grailnode.node.node_makers import (
    engine_directory,
    make_canary,
    make_node,
    make_spectator,
    open_trainer_state,
    read_key,
)
from grailnode.node.outer_settings import coordinator_settings, site_settings
from grailnode.node.process_kinds import TRAINER_KINDS, Kind
from grailnode.node.run_model import (
    DTYPES,
    follower_model,
    genesis_reader,
    policy_directory,
    publish_run_base,
    trainer_model,
)
from grailnode.node.seat import Seat, prepare_rank
from grailnode.node.settings import TrainerSettings, miner_settings, trainer_settings, validator_settings
from grailnode.node.state_locks import lock_state
from grailnode.node.stores import sweep_orphans
from grailnode.node.supervisor import EXIT_PERMANENT, EXIT_TRANSIENT, run_process
from grailnode.node.telemetry import NodeTelemetry
from grailnode.node.tracking import track
from grailnode.node.user_errors import explain, is_transient
from grailnode.node.wiring import (
    MINER_VERSIONS,
    make_task,
    run_collector,
    run_coordinator,
    run_miner,
    run_publisher,
    run_training,
    run_validator,
    run_worker,
    validator_versions,
)
from grailnode.observe.recheck import GroupReference, RecheckedGroup, recheck
from grailnode.run import creation, key_files, requirements
from protocol import paths
from protocol.beacon import LocalKey
from protocol.digest import Weights
from protocol.environments import Sandbox
from protocol.run import RunManifest
from roles.node.change_reporter import ChangeReporter
from roles.node.identity import Node
from roles.policy.assignment import Task
from roles.policy.causal_model import CausalModel
from roles.ports import StoreError
from roles.trainer.publish.publisher import PublisherSettings

if TYPE_CHECKING:
    from roles.trainer.learn.sharded.sharded_learner import ShardedLearner

_ORPHAN_SWEEPERS: tuple[Kind, ...] = (
    "upload",
    "canary",
    "coordinator",
    "site",
    "miner",
    "validator",
)  # one for each space
TRAINER_BLOCK = 128 << 10
"""Bytes of a block of memory that a trainer's process gives back when it is freed."""
FOLLOWER_BLOCK = 1 << 20
"""The same of a process that samples or checks: a token's decoding allocates smaller ones again and again."""
_FOLLOWERS = ("canary", "miner", "validator")
_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 0.5, 30.0


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
    return_large_blocks(FOLLOWER_BLOCK if launch.kind in _FOLLOWERS else TRAINER_BLOCK)
    run_process(f"{launch.name}/{launch.kind}", partial(_run, launch, body or _BODIES[launch.kind]))


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
            gc.freeze()  # what was imported stays, and to look through it takes tenths of a second on the event loop
            trio.lowlevel.add_instrument(LoopWatch(StepReporter(telemetry), LONG_STEP_SECONDS))
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
        return EXIT_TRANSIENT if is_transient(error) else EXIT_PERMANENT
    return 0


def metrics_port(config: Config, kind: Kind) -> int:
    """Return the port on which a process serves its metrics; a trainer's ports are consecutive, as in TRAINER_KINDS."""
    return config.node.metrics_port + (TRAINER_KINDS.index(kind) if kind in TRAINER_KINDS else 0)


async def join_run(node: Node, config: Config, name: str, versions: int = MINER_VERSIONS) -> tuple[Task, Compute]:
    """Wait for the run's files in the store, and return the run's task and model.

    The sandbox, if the run needs one, is opened first: without it the node cannot take part.

    Args:
        versions: of the weights, that the node keeps.
    """
    sandbox = await node.run_sync(requirements.open_sandbox, node.run)
    reporter = ChangeReporter(node.telemetry, "files-missing")
    pause = _RETRY_SECONDS
    while True:
        try:
            return await _task(node, config, config.at(config.node.state) / name, sandbox, versions)
        except StoreError as error:
            reporter.failure(error)
            await trio.sleep(pause)
            pause = min(2 * pause, _LONGEST_RETRY_SECONDS)  # a file that is damaged in storage is downloaded each time


async def _task(
    node: Node, config: Config, directory: Path, sandbox: Sandbox | None, versions: int
) -> tuple[Task, Compute]:
    """Fetch the run's files into a directory, and return the run's task and model."""
    policy = await creation.fetch_model(node.store, node.run, node.authority.trainers, directory / "model")
    check_disk(directory, follower_bytes(node.run, config, policy, versions))
    data = await creation.fetch_data(node.store, node.run, node.authority.trainers, directory / "data")
    task = make_task(node, policy, data, sandbox)
    if node.run.numerics == "exact":  # also for a trainer's canary, whatever its own device
        return task, Compute(build_exact(policy), max_batch_tokens=config.engine.max_batch_tokens)
    engine = config.engine
    device = engine.device if engine.kind == "torch" or engine.states == "torch" else "cpu"
    compute = _torch_compute(await follower_model(node, config, policy, directory, device), config)
    if engine.kind == "torch":
        return task, compute
    python = None if engine.python is None else config.at(engine.python)
    vllm = engine.model_copy(update={"python": python})
    policy_files, engine_files = policy.directory.absolute(), engine_directory(directory).absolute()
    return task, replace(compute, vllm=vllm, policy=policy_files, directory=engine_files)


def _torch_compute(model: CausalModel, config: Config) -> Compute:
    """Return how a node computes a model with torch."""
    engine = config.engine
    return Compute(model, device=engine.device, dtype=DTYPES[engine.dtype], max_batch_tokens=engine.max_batch_tokens)


async def publish_beacon(node: Node, launch: Launch) -> None:
    """Publish the rounds of the run's own beacon until cancelled."""
    config = launch.config
    secret = key_files.read(config.at(config.node.keys) / f"{config.beacon.key}{key_files.SUFFIX}")
    key = LocalKey.from_seed(secret)
    keep, telemetry = config.beacon.keep_rounds, node.telemetry
    await publish_rounds(key, node.run.beacon, node.store, node.clock, keep=keep, telemetry=telemetry)


def data_file(config: Config) -> Path | None:
    """Return the path of the trainer's data file; None when run.toml names no data file."""
    return None if config.trainer.data is None else config.at(config.trainer.data)


async def _training(node: Node, launch: Launch, seat: Seat | None = None) -> None:
    """Train, on one device or as rank 0 of several."""
    genesis = genesis_reader(launch.config, node.run, policy_directory(launch.config))
    compute, settings = await node.run_sync(_training_compute, launch.config, node.run)
    if seat is None:
        await run_training(node, genesis, compute, settings)
        return
    await run_training(node, genesis, compute, settings, _rank_0(compute, settings, genesis, seat))


def _rank_0(
    compute: Compute, settings: TrainerSettings, genesis: Callable[[], Weights], seat: Seat
) -> "Callable[[], ShardedLearner]":
    """Return a function that joins the other ranks, and returns the learner of all."""
    from grailnode.node.rank_processes import join_ranks  # noqa: PLC0415 - it imports torch's compiler
    from roles.trainer.learn.sharded.rank_learner import RankLearner  # noqa: PLC0415
    from roles.trainer.learn.sharded.sharded_learner import ShardedLearner  # noqa: PLC0415

    def make_learner() -> ShardedLearner:
        group = join_ranks(seat, compute.device)
        return ShardedLearner(RankLearner(compute.model, settings.learner, group, compute.dtype), genesis())

    return make_learner


def _training_compute(config: Config, run: RunManifest) -> tuple[Compute, TrainerSettings]:
    compute = _torch_compute(trainer_model(config, run, policy_directory(config)), config)
    return compute, trainer_settings(config, run.sampling.params())


def main_of_rank(launch: Launch, seat: Seat) -> None:
    """Run one of the ranks of a process that trains until it is stopped, or until rank 0 has ended."""
    prepare_rank(seat)
    if seat.rank == 0:
        main(launch, partial(_site if launch.kind == "site" else _training, seat=seat))
        return
    torch.set_num_threads(launch.config.engine.threads)
    return_large_blocks(TRAINER_BLOCK)
    run_process(f"{launch.name}/{launch.kind}-{seat.rank}", partial(_run_rank, launch, seat))


async def _run_rank(launch: Launch, seat: Seat) -> int:
    """Follow rank 0, and return the exit code. A rank has no key, no store and no state."""
    from grailnode.node.rank_processes import follow  # noqa: PLC0415 - it imports torch's compiler

    config, process = launch.config, f"{launch.name}/{launch.kind}-{seat.rank}"
    log = config.at(config.node.logs) / f"{process.replace('/', '-')}.jsonl"
    telemetry = NodeTelemetry.to_file(process, log, sys.stderr if launch.echo else None)
    try:
        compute, settings = _training_compute(config, make_spectator(config).run)
        await follow(compute, settings.learner, seat)
    except Exception as error:
        line = explain(error)
        if line is None:
            raise
        telemetry.event("failed", error=line)
        return 1 if is_transient(error) else EXIT_PERMANENT
    return 0


async def _upload(node: Node, launch: Launch) -> None:
    await _publish_run(node, launch.config)
    await run_publisher(node, _publisher_settings(node, launch.config))


async def _publish_run(node: Node, config: Config) -> None:
    """Publish the run's manifest, and the files that it names."""
    data = requirements.files_to_publish(node.run, data_file(config))
    await publish_run_base(node, policy_directory(config))
    files = creation.model_files(policy_directory(config)) | data
    await creation.publish_files(node.store, node.key.public, files)
    await node.publish(paths.run(node.run_id), config.at(config.run.manifest).read_bytes())


def _publisher_settings(node: Node, config: Config) -> PublisherSettings:
    expiry_offset_ms = secrets.randbelow(max(1, node.run.head_ttl * 100))
    return replace(trainer_settings(config, node.run.sampling.params()).publisher, expiry_offset_ms=expiry_offset_ms)


async def _coordinator(node: Node, launch: Launch) -> None:
    config = launch.config
    settings = coordinator_settings(config, node.run)
    await _publish_run(node, config)
    genesis = genesis_reader(config, node.run, policy_directory(config))
    await run_coordinator(node, genesis, _publisher_settings(node, config), settings)


async def _site(node: Node, launch: Launch, seat: Seat | None = None) -> None:
    """Collect and train as a site, on one device or as rank 0 of several."""
    config = launch.config
    genesis = genesis_reader(config, node.run, policy_directory(config))
    compute, settings = await node.run_sync(_training_compute, config, node.run)
    make_learner = None if seat is None else _rank_0(compute, settings, genesis, seat)
    await run_worker(node, genesis, compute, settings, site_settings(config, node.run), make_learner)


async def _download(node: Node, launch: Launch) -> None:
    await run_collector(node, trainer_settings(launch.config, node.run.sampling.params()).collector)


async def _miner(node: Node, launch: Launch) -> None:
    task, compute = await join_run(node, launch.config, launch.name)
    await run_miner(node, task, compute, miner_settings(launch.config))


async def _canary(node: Node, launch: Launch) -> None:
    config = launch.config
    task, compute = await join_run(node, config, f"{launch.name}-canary")
    trainer_state = open_trainer_state(config, launch.name, node)
    producer = partial(CanaryProducer, trainer=read_key(config, launch.name), trainer_state=trainer_state)
    await run_miner(node, task, compute, miner_settings(config), producer)


async def _tracking(node: Node, launch: Launch) -> None:
    await track(node, launch.config, Policy.load(policy_directory(launch.config)).tokenizer)


async def recheck_group(config: Config, reference: GroupReference) -> RecheckedGroup:
    """Judge one group of a run again, as anybody can."""
    node = make_spectator(config)
    sandbox = await node.run_sync(requirements.open_sandbox, node.run)
    with tempfile.TemporaryDirectory(prefix="grailnode-verify-") as directory:
        task, compute = await _task(node, config, Path(directory), sandbox, MINER_VERSIONS)
        return await recheck(node, task, compute, reference)


async def _validator(node: Node, launch: Launch) -> None:
    task, compute = await join_run(node, launch.config, launch.name, validator_versions(node.run))
    await run_validator(node, task, compute, validator_settings(launch.config))


_BODIES: dict[Kind, ProcessBody] = {
    "beacon": publish_beacon,
    "training": _training,
    "upload": _upload,
    "download": _download,
    "canary": _canary,
    "tracking": _tracking,
    "coordinator": _coordinator,
    "site": _site,
    "miner": _miner,
    "validator": _validator,
}
