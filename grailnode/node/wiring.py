"""Assembles each role from a node, an engine and its settings. The processes and the simulator both use it."""

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
import trio

from grailnode.config import TrainerSection
from grailnode.engine.compute import Compute, open_engine
from grailnode.engine.policy import Policy
from grailnode.node.mapped_tensors import mapped_tensors
from protocol import environments
from protocol.digest import Weights
from protocol.environments import Environment, Sandbox
from protocol.environments.mixture import Strata, mixed
from protocol.environments.record import MixtureSpec
from protocol.errors import MalformedError, ProtocolError
from protocol.judging.ledger import SharesOf
from protocol.quantization import Precision
from protocol.run import RunManifest
from roles.authority_updates import under_authority
from roles.miner.miner import Miner
from roles.miner.miner_settings import MinerSettings
from roles.miner.produce import HonestProducer, Producer
from roles.node.identity import Node
from roles.policy.assignment import Task
from roles.policy.follower import Follower
from roles.ports import Engine
from roles.trainer.collect.collector import Collector
from roles.trainer.learn.learner import Learner, LearnerSettings
from roles.trainer.learn.replay_buffer import ReplayBuffer
from roles.trainer.learn.training import Training
from roles.trainer.outer.coordinator import Coordinator, CoordinatorSettings, PublisherLink
from roles.trainer.outer.local_steps import LocalLearner, SiteSettings
from roles.trainer.outer.site import Site
from roles.trainer.publish.history import History
from roles.trainer.publish.host_files import HostFiles
from roles.trainer.publish.publisher import Publisher, PublisherSettings
from roles.trainer.spool import checked_genesis, newest_weights, weights_folder
from roles.trainer.tensor_shards import read_tensors
from roles.validator.ledger_state import Ledger, check_published, wait_and_check
from roles.validator.validator import Validator
from roles.validator.validator_settings import ValidatorSettings

MINER_VERSIONS = 1  # of the weights, that a miner keeps
_LATE_JUDGING_VERSIONS = 4  # versions that a validator keeps beyond `max_lag`, for windows that it judges late
_MAX_CONCURRENT_PROGRAMS = 8  # in sandboxes; each may use a gigabyte of memory


def make_task(
    node: Node,
    policy: Policy,
    data: bytes | None = None,
    sandbox: Sandbox | None = None,
    plugins: Mapping[str, Environment] = MappingProxyType({}),
) -> Task:
    """Return the task that the run sets its miners and validators; some environments need a data file or a sandbox."""
    environment = make_environment(node.run.environment, data, sandbox, plugins)
    rule, strata = node.run.difficulty, None
    if rule is not None:
        strata = Strata(environment)
        if list(strata.weights) != [stratum.name for stratum in rule.strata]:
            raise MalformedError(f"its strata are {', '.join(strata.weights) or 'none'}", "the run's environment")
    concurrency = min(_MAX_CONCURRENT_PROGRAMS, len(os.sched_getaffinity(0))) if sandbox is not None else 1
    tokenizer, vocabulary = policy.tokenizer, policy.vocabulary
    return Task(node.run_id, node.run, environment, tokenizer, vocabulary, node.run_sync, concurrency, strata)


def make_environment(
    mixture: MixtureSpec, data: bytes | None, sandbox: Sandbox | None, plugins: Mapping[str, Environment]
) -> Environment:
    """Return the environment of a task; `plugins` are opened already."""
    members: list[tuple[int, Environment]] = []
    try:
        for share in mixture:
            name = share.environment.name
            own_data = data if name in environments.data_names else None
            members.append((share.ppm, plugins.get(name) or environments.get(name, own_data, sandbox)))
    except ProtocolError as error:
        raise MalformedError(str(error), "the run's data file") from error
    return mixed(members)


def validator_versions(run: RunManifest) -> int:
    """Return how many versions of the weights a validator keeps."""
    return run.schedule.max_lag + _LATE_JUDGING_VERSIONS


async def _open_follower(node: Node, compute: Compute, versions: int) -> Follower:
    """Return a follower that keeps some versions: on the disk, if the engine has the weights in its own memory."""
    new_tensors = None if compute.vllm is None else partial(mapped_tensors, compute.directory / "versions")
    return await Follower(node, keep=versions, threads=torch.get_num_threads(), new_tensors=new_tensors).open()


async def run_miner(
    node: Node,
    task: Task,
    compute: Compute,
    settings: MinerSettings,
    producer: Callable[[Task, Engine], Producer] = HonestProducer,
    beside: Callable[[Engine, SharesOf], Awaitable[None]] | None = None,
) -> None:
    """Mine until cancelled; `beside` is what else uses the engine and the shares by which groups draw."""
    async with under_authority(node):
        follower = await _open_follower(node, compute, MINER_VERSIONS)
        async with open_engine(compute, node.run_sync, node.telemetry.event) as engine, trio.open_nursery() as tasks:
            if beside is not None:
                tasks.start_soon(beside, engine, follower.shares)
            await Miner(node, follower, engine, producer(task, engine), settings).run()


async def run_validator(node: Node, task: Task, compute: Compute, settings: ValidatorSettings) -> None:
    async with under_authority(node):
        follower = await _open_follower(node, compute, validator_versions(node.run))
        ledger = await Ledger.open(node.state, node.run)
        await wait_and_check(node, partial(check_published, node, ledger))
        async with open_engine(compute, node.run_sync, node.telemetry.event) as engine:
            await Validator(node, follower, engine, task, ledger, settings).run()


def make_learner(compute: Compute, settings: LearnerSettings, precision: Precision, weights: Weights) -> Learner:
    """Return a learner of one process."""
    return Learner(compute.model, weights, settings, torch.device(compute.device), compute.dtype, precision)


async def run_training(
    node: Node, make_learner: Callable[[], Learner], genesis: Callable[[], Weights], settings: TrainerSection
) -> None:
    """Train until cancelled: the training process of a trainer."""
    learner: Learner = await node.run_sync(make_learner)
    await Training(node, learner, ReplayBuffer(settings, settings.seed), genesis, settings).run()


async def run_publisher(node: Node, settings: PublisherSettings, others: Sequence[HostFiles] = ()) -> None:
    """Publish versions until cancelled, with what other hosts encode: the upload process of a trainer."""
    async with under_authority(node):
        await Publisher(node, await History.open(node.state), settings, others).run()


async def run_coordinator(
    node: Node, genesis: Callable[[], Weights], publisher: PublisherSettings, settings: CoordinatorSettings
) -> None:
    """Close the rounds of sites that train together, and publish the versions, until cancelled."""

    async def first_version() -> tuple[int, Weights]:
        newest = await newest_weights(node.state)
        if newest is None:
            return 0, await node.run_sync(checked_genesis, node.run, genesis)
        version, shards = newest
        return version, await read_tensors(node.state, weights_folder(version), shards, node.run_sync)

    async with under_authority(node), trio.open_nursery() as nursery:
        history = await History.open(node.state)
        uploads = Publisher(node, history, publisher)
        nursery.start_soon(uploads.run)
        await uploads.started.wait()  # the rounds are signed in the publisher's epoch
        link = PublisherLink(uploads.fence.check, lambda: history.epoch, first_version)
        await Coordinator(node, settings, link).run()


async def run_worker(
    node: Node, make_learner: Callable[[], LocalLearner], trainer: TrainerSection, settings: SiteSettings
) -> None:
    """Do all the work of a worker's node until cancelled."""
    async with under_authority(node):
        learner: LocalLearner = await node.run_sync(make_learner)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.keep_announced, "worker", 600.0)
            nursery.start_soon(Collector(node, trainer.poll_seconds, trainer.canaries).run)
            site: Site = await node.run_sync(Site, node, learner, settings)
            await site.run()


async def run_collector(node: Node, settings: TrainerSection) -> None:
    """Collect groups until cancelled: the download process of a trainer."""
    async with under_authority(node):
        await Collector(node, settings.poll_seconds, settings.canaries).run()
