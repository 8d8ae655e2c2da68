"""Roles with their adapters: the only place where both are known. Used alike by processes and by the simulator."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from grailnode.engine.model import CausalModel
from grailnode.engine.torch_engine import TorchEngine
from grailnode.policy import Policy
from protocol import environments
from protocol.digest import Weights
from protocol.environments import Sandbox
from protocol.errors import MalformedError, ProtocolError
from roles.assignment import Task
from roles.authority import under_authority
from roles.follower import Follower
from roles.miner.node import Miner, MinerSettings
from roles.miner.produce import HonestProducer, Producer
from roles.node import Node
from roles.trainer.collector import Collector, CollectorSettings
from roles.trainer.history import History
from roles.trainer.learner import Learner, LearnerSettings
from roles.trainer.publisher import Publisher, PublisherSettings
from roles.trainer.replay import ReplayBuffer, ReplaySettings
from roles.trainer.training import Training, TrainingSettings
from roles.validator.ledger import Ledger
from roles.validator.node import Validator, ValidatorSettings

_BEHIND = 4  # versions a validator keeps beside those that laggards may declare, for windows that it judges late

_MOST_TRIALS = 8  # of programs at a time: each may take a gigabyte


@dataclass(frozen=True)
class Compute:
    """Where and how a node computes.

    Attributes:
        model: the policy's architecture.
        device: of torch; dtype: the BF16 weights are widened to this for computing.
        max_batch_tokens: padded tokens of one batch.
    """

    model: CausalModel
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    max_batch_tokens: int = 8192


@dataclass(frozen=True)
class TrainerSettings:
    """Everything a trainer's operator decides."""

    training: TrainingSettings
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    publisher: PublisherSettings = field(default_factory=PublisherSettings)
    collector: CollectorSettings = field(default_factory=CollectorSettings)
    seed: int = 0


def make_task(node: Node, policy: Policy, data: bytes | None = None, sandbox: Sandbox | None = None) -> Task:
    """What the run asks of miners and validators.

    Args:
        data: the run's data file, for an environment that reads one; sandbox: for one that runs programs.

    Raises:
        ValueError: this program does not know the run's environment, or was not given what it needs.
        ProtocolError: the data is no file of its problems.
    """
    try:
        environment = environments.get(node.run.environment, data, sandbox)
    except ProtocolError as error:
        raise MalformedError(str(error), "the run's data file") from error
    at_once = min(_MOST_TRIALS, len(os.sched_getaffinity(0))) if sandbox is not None else 1
    return Task(node.run_id, node.run, environment, policy.tokenizer, policy.vocabulary, node.run_sync, at_once)


def make_engine(node: Node, compute: Compute) -> TorchEngine:
    """The engine that samples and checks."""
    return TorchEngine(
        compute.model,
        device=compute.device,
        dtype=compute.dtype,
        max_batch_tokens=compute.max_batch_tokens,
        run_sync=node.run_sync,
    )


async def run_miner(
    node: Node,
    task: Task,
    compute: Compute,
    settings: MinerSettings,
    producer: Callable[[Task, TorchEngine], Producer] = HonestProducer,
) -> None:
    """Mine for ever."""

    async def mine() -> None:
        engine = make_engine(node, compute)
        follower = await Follower.open(node)
        await Miner(node, follower, engine, producer(task, engine), settings).run()

    await under_authority(node, mine)


async def run_validator(node: Node, task: Task, compute: Compute, settings: ValidatorSettings) -> None:
    """Validate for ever."""

    async def validate() -> None:
        follower = await Follower.open(node, keep=node.run.schedule.max_lag + _BEHIND)
        ledger = await Ledger.open(node.state, node.run.scoring)
        engine = make_engine(node, compute)
        await Validator(node, follower, engine, task, ledger, settings).run()

    await under_authority(node, validate)


async def run_training(node: Node, genesis: Callable[[], Weights], compute: Compute, settings: TrainerSettings) -> None:
    """Train for ever: the training process."""
    learner = Learner(
        compute.model, genesis(), settings.learner, device=torch.device(compute.device), dtype=compute.dtype
    )
    buffer = ReplayBuffer(settings.replay, settings.seed)
    await Training(node, learner, buffer, genesis, settings.training).run()


async def run_publisher(node: Node, settings: PublisherSettings) -> None:
    """Publish for ever: the upload process."""

    async def publish() -> None:
        history = await History.open(node.state)
        await Publisher(node, history, settings).run()

    await under_authority(node, publish)


async def run_collector(node: Node, settings: CollectorSettings) -> None:
    """Collect for ever: the download process."""
    await under_authority(node, Collector(node, settings).run)
