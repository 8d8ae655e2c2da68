"""What each kind of process of a node does, once its node has been made: the bodies that processes.py runs."""

import importlib.metadata
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from grailnode.beacon.relays import publish_rounds
from grailnode.config import Config
from grailnode.engine.compute import Compute
from grailnode.engine.models import build_exact
from grailnode.engine.policy import Policy, load_weights
from grailnode.environments.plugin_environment import PluginEnvironment
from grailnode.environments.wheels import PluginError
from grailnode.node import wiring
from grailnode.node.canary import CanaryAudit, CanaryProducer
from grailnode.node.disk_check import check_disk, follower_bytes
from grailnode.node.node_makers import engine_directory, make_spectator, open_trainer_state, read_key, state_directory
from grailnode.node.process_launch import Kind, Launch
from grailnode.node.run_model import (
    DTYPES,
    coordinator_settings,
    follower_model,
    genesis_reader,
    learner_settings,
    policy_directory,
    publisher_settings,
    recomputes_layers,
    site_settings,
    trainer_model,
)
from grailnode.node.state_locks import lock_state
from grailnode.node.stores import Storage
from grailnode.node.telemetry import NodeTelemetry
from grailnode.node.upload_hosts import OtherHost, follow_host_0, listen_for_hosts
from grailnode.run import creation, key_files, requirements
from grailnode.run.base_files import publish_base
from grailnode.sandbox import BubblewrapSandbox
from grailnode.track.tracker import track
from protocol import paths
from protocol.beacon import LocalKey
from protocol.environments import Environment
from protocol.judging.ledger import SharesOf
from protocol.run import RunManifest
from roles.node.identity import Node
from roles.node.retries import Pause, WaitReporter
from roles.policy.assignment import Task
from roles.policy.causal_model import CausalModel
from roles.ports import Engine, StoreError, Telemetry
from roles.trainer.learn.learner import Learner, LearnerSettings
from roles.trainer.learn.loss.loss_settings import LossSettings
from roles.trainer.learn.training_settings import OptimizerSettings
from roles.trainer.spool import checked_genesis

if TYPE_CHECKING:  # it imports torch's compiler, for half a second
    from grailnode.node.rank_processes import Meeting

_JOIN_PAUSE = Pause(first=0.5, longest=30.0)  # a file that is damaged in storage is downloaded each time

ProcessBody = Callable[[Node, Launch], Awaitable[None]]
"""What a process does after its node has been made; it runs until cancelled."""


async def join_run(
    node: Node, config: Config, name: str, versions: int = wiring.MINER_VERSIONS
) -> tuple[Task, Compute]:
    """Wait for the run's files in the store, and return the run's task and model for a node with so many versions."""
    pause = 0.0
    with WaitReporter(node.telemetry, "files-missing") as reporter:
        while True:
            try:
                return await fetch_task(node, config, config.at(config.node.state) / name, versions)
            except StoreError as error:
                reporter.waiting("files", error, "the trainer's public space shows the run's files")
                pause = _JOIN_PAUSE.after(pause)
                await trio.sleep(pause)


async def fetch_task(
    node: Node, config: Config, directory: Path, versions: int = wiring.MINER_VERSIONS
) -> tuple[Task, Compute]:
    """Fetch the run's files into a directory, and return the run's task and model for a node that keeps so many
    versions. The sandbox, if the run needs one, is opened first: without it the node cannot take part.
    """
    sandbox = await node.run_sync(requirements.open_sandbox, node.run)
    policy = await creation.fetch_model(node, directory / "model")
    check_disk(directory, follower_bytes(node.run, config, policy, versions))
    data = await creation.fetch_data(node, directory / "data")
    plugins = {} if sandbox is None else await _open_plugins(node, config, sandbox)
    task: Task = await node.run_sync(wiring.make_task, node, policy, data, sandbox, plugins)  # it parses the data file
    if node.run.numerics == "exact":  # also for a trainer's canary, whatever its own device
        return task, Compute(build_exact(policy), max_batch_tokens=config.engine.max_batch_tokens)
    engine = config.engine
    device = engine.device if engine.kind == "torch" else "cpu"
    compute = make_compute(config, await follower_model(node, config, policy, directory, device), policy, directory)
    return task, replace(compute, lora=node.run.lora)


async def _open_plugins(node: Node, config: Config, sandbox: BubblewrapSandbox) -> dict[str, Environment]:
    """Return the run's environments that are no built-in ones, by name, from the wheels that the run names."""
    plugins: dict[str, Environment] = {}
    for spec in node.run.tasks:
        if not spec.is_plugin:
            continue
        folders = await creation.fetch_wheels(node, spec, config.at(config.node.state) / "wheels")
        plugin = await node.run_sync(PluginEnvironment.open, sandbox, folders, spec.name, spec.config)
        if plugin.exact != spec.exact:
            raise PluginError(f"environment {spec.name!r}: the run says exact = {spec.exact}, and its code does not")
        if not node.run.plays(plugin.turns):
            raise PluginError(f"environment {spec.name!r}: its code has {plugin.turns} turns, and the run has others")
        plugins[spec.name] = plugin
    return plugins


def _torch_compute(model: CausalModel, config: Config) -> Compute:
    engine = config.engine
    return Compute(model, engine.device, DTYPES[engine.dtype], engine.max_batch_tokens, engine.draft is not None)


def make_compute(config: Config, model: CausalModel, policy: Policy, directory: Path) -> Compute:
    """Return how a node samples and checks with a model; an engine of vLLM keeps its files in the directory."""
    compute = _torch_compute(model, config)
    if config.engine.kind == "torch":
        return compute
    vllm = config.engine.model_copy(update={"python": config.vllm_python})
    policy_files, engine_files = policy.directory.absolute(), engine_directory(directory).absolute()
    return replace(compute, vllm=vllm, policy=policy_files, directory=engine_files)


def published_files(config: Config) -> tuple[Path | None, Path | None]:
    """Return the paths of the trainer's data file and of its wheels; None for one that run.toml does not name."""
    data, wheels = (None if path is None else config.at(path) for path in (config.trainer.data, config.trainer.wheels))
    return data, wheels


async def publish_beacon(node: Node, launch: Launch) -> None:
    config = launch.config
    key = LocalKey.from_seed(key_files.read(config.at(config.node.keys) / f"{config.beacon.key}{key_files.SUFFIX}"))
    keep, telemetry = config.beacon.keep_rounds, node.telemetry
    await publish_rounds(key, node.run.beacon, node.store, node.clock, keep=keep, telemetry=telemetry)


async def train(node: Node, launch: Launch, meeting: "Meeting | None" = None) -> None:
    """Train, as a site too, on one device or as rank 0 of several."""
    config, run = launch.config, node.run
    genesis = genesis_reader(config, run, policy_directory(config))
    compute, settings = await node.run_sync(_training_compute, config, run)

    def make_learner() -> Learner:
        weights = checked_genesis(run, genesis) if launch.kind == "site" else genesis()
        if meeting is None:
            return wiring.make_learner(compute, settings, run.precision, weights)
        return meeting.make_learner(compute, settings, run.precision, _terms(config, node.run_id, compute), weights)

    if launch.kind == "site":
        await wiring.run_worker(node, make_learner, config.trainer, site_settings(config, run))
    else:
        await wiring.run_training(node, make_learner, genesis, config.trainer)


def _terms(config: Config, run_id: bytes, compute: Compute) -> dict[str, str]:
    """Return what must be equal on all hosts that share a step; a step cannot notice that it is not."""
    # what reads the reference is used by rank 0 alone
    names = {*LossSettings.model_fields, *OptimizerSettings.model_fields, "logits_chunk", "recompute", "packing"} - {
        "reference"
    }
    directory = policy_directory(config)
    section = config.trainer.model_dump(include=names) | {"recompute": recomputes_layers(config, directory)}
    return {
        "the run": run_id.hex(),
        **{f"the version of {name}": importlib.metadata.version(name) for name in ("grailnode", "torch")},
        "the policy's config.json": (directory / "config.json").read_text(encoding="utf-8"),
        "the settings [trainer] and [engine]": f"{section} {compute.dtype} {compute.max_batch_tokens}",
    }


def _training_compute(config: Config, run: RunManifest) -> tuple[Compute, LearnerSettings]:
    compute = _torch_compute(trainer_model(config, run, policy_directory(config)), config)
    return compute, learner_settings(config, run)


async def _upload(node: Node, launch: Launch) -> None:
    await _publish_run(node, launch.config)
    settings, hosts = publisher_settings(launch.config, node.run), launch.config.trainer.hosts
    others = [OtherHost(node, number, settings.profile) for number in range(1, hosts.count)] if hosts else []
    async with trio.open_nursery() as nursery:
        if hosts:
            nursery.start_soon(listen_for_hosts, node, others, hosts.meeting)
        await wiring.run_publisher(node, settings, others)


async def _publish_run(node: Node, config: Config) -> None:
    data = requirements.files_to_publish(node.run, *published_files(config))
    if node.run.lora is not None:
        await publish_base(node, node.run.lora, await node.run_sync(load_weights, policy_directory(config)))
    files = creation.model_files(policy_directory(config)) | data
    await creation.publish_files(node.store, node.key.public, files)
    await node.publish(paths.run(node.run_id), config.at(config.run.manifest).read_bytes())


async def _download(node: Node, launch: Launch) -> None:
    await wiring.run_collector(node, launch.config.trainer)


async def _tracking(node: Node, launch: Launch) -> None:
    await track(node, launch.config, Policy.load(policy_directory(launch.config)).tokenizer)


async def _coordinator(node: Node, launch: Launch) -> None:
    config = launch.config
    settings = coordinator_settings(config, node.run)
    await _publish_run(node, config)
    genesis = genesis_reader(config, node.run, policy_directory(config))
    await wiring.run_coordinator(node, genesis, publisher_settings(config, node.run), settings)


async def _miner(node: Node, launch: Launch) -> None:
    task, compute = await join_run(node, launch.config, launch.name)
    await wiring.run_miner(node, task, compute, launch.config.miner)


async def _canary(node: Node, launch: Launch) -> None:
    config = launch.config
    task, compute = await join_run(node, config, f"{launch.name}-canary")
    trainer_state = open_trainer_state(config, launch.name, node)
    trainer = read_key(config, launch.name)
    producer = partial(CanaryProducer, trainer=trainer, trainer_state=trainer_state)

    async def audit(engine: Engine, shares_of: SharesOf) -> None:
        await CanaryAudit(node, task, engine, trainer, trainer_state, shares_of).run()

    await wiring.run_miner(node, task, compute, config.miner, producer, audit)


async def _validator(node: Node, launch: Launch) -> None:
    task, compute = await join_run(node, launch.config, launch.name, wiring.validator_versions(node.run))
    await wiring.run_validator(node, task, compute, launch.config.validator)


async def follow_rank_0(launch: Launch, telemetry: Telemetry, meeting: "Meeting") -> None:
    """Compute what rank 0 asks for, on another rank, which has no key and no store."""
    config, is_first = launch.config, meeting.seat.leads_host

    async def work() -> None:
        spectator = await trio.to_thread.run_sync(make_spectator, config)
        compute, settings = await spectator.run_sync(_training_compute, config, spectator.run)
        terms = _terms(config, spectator.run_id, compute)
        directory = state_directory(config, launch.name)
        with lock_state(directory, launch.kind) if is_first else nullcontext():
            state = open_trainer_state(config, launch.name, spectator)
            make_learner = partial(meeting.make_learner, compute, settings, spectator.run.precision, terms)
            learner = await trio.to_thread.run_sync(make_learner, abandon_on_cancel=True)
            await learner.follow(state, sweeps=is_first)

    await meeting.run(work, telemetry)


async def upload_for_host_0(launch: Launch, telemetry: NodeTelemetry) -> None:
    """Encode and upload this host's files of each version, as host 0 asks: without the trainer's key."""
    config, hosts = launch.config, launch.config.trainer.hosts
    assert hosts is not None
    with lock_state(state_directory(config, launch.name), launch.kind):
        spectator = make_spectator(config)
        state, store = open_trainer_state(config, launch.name, spectator), Storage(config, telemetry).own()
        node = replace(spectator, store=store, state=state, telemetry=telemetry, shared_revisions=spectator.revisions)
        await follow_host_0(node, hosts.number, hosts.meeting, config.engine.threads)


BODIES: dict[Kind, ProcessBody] = {
    "beacon": publish_beacon,
    "training": train,
    "upload": _upload,
    "download": _download,
    "canary": _canary,
    "tracking": _tracking,
    "coordinator": _coordinator,
    "site": train,
    "miner": _miner,
    "validator": _validator,
}
