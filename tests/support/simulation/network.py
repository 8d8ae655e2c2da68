"""A whole network in one process on trio's virtual clock: the real roles, protocol and engine over a store in memory.

Nothing here runs in a thread, so the same seed gives the same trace.
"""

import hashlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import trio

from grailnode.beacon.relays import StoreBeacon, publish_rounds
from grailnode.chat.chat_template import ChatTemplate
from grailnode.config import TrainerSection
from grailnode.demo.cheater import run_cheater
from grailnode.engine import models
from grailnode.engine.compute import Compute
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from grailnode.node import wiring
from grailnode.node.canary import CanaryAudit, CanaryProducer
from grailnode.run import creation
from grailnode.run.rules import Rules
from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.beacon import LocalKey
from protocol.chain.manifest import Head
from protocol.environments import Sandbox
from protocol.identity.signing import Signed, SigningKey, open_signed
from protocol.judging.ledger import SharesOf
from protocol.judging.report import canary_key
from protocol.run import RunManifest
from roles.miner.miner_settings import MinerSettings
from roles.miner.produce import HonestProducer
from roles.node.identity import Node
from roles.policy.assignment import Task
from roles.ports import Engine, ObjectStore
from roles.trainer.learn.learner import Learner, LearnerSettings
from roles.trainer.publish.publisher import PublisherSettings
from roles.validator.validator_settings import ValidatorSettings
from tests.support.simulation import small_policy
from tests.support.simulation.virtual_clock import TrioClock

BEGIN = 1_750_000_000.0
PERIOD_MS = 250


async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return a function's result, computed in this task while virtual time stands still."""
    await trio.lowlevel.checkpoint()
    return function(*arguments)


@cache
def key(name: str) -> SigningKey:
    return SigningKey(random.Random(name).randbytes(32))


@dataclass
class Log:
    """Records the events of a node."""

    name: str
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def event(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def named(self, name: str) -> list[dict[str, Any]]:
        """Return the fields of all events of a name."""
        return [fields for event, fields in self.events if event == name]


BEACON_KEY = LocalKey.from_seed(b"simulated beacon")


def randomness(round_number: int) -> bytes:
    """Return the randomness of a round of the simulated beacon."""
    return hashlib.sha256(BEACON_KEY.sign(round_number)).digest()


@cache
def draft(rules: Rules, validators: tuple[str, ...], policy: Path = PACKAGED_POLICY) -> RunManifest:
    """Return the manifest of a simulated run."""
    rules = creation.completed(rules, "demo")
    chat = ChatTemplate.read(policy).chat(rules.system_prompt, ()) if rules.chat else None
    return creation.draft_manifest(
        rules.changed(deposit=0.0),  # a network of a few windows has no time to work off a deposit
        policy,
        BEACON_KEY.chain(PERIOD_MS, int(BEGIN * 1000) + 1000),
        creation.first_authority(
            rules,
            roots=[key("root").public],
            trainers=[key("trainer").public],
            validators=[key(name).public for name in validators],
        ),
        None if rules.numerics == "exact" else small_policy.proof_of(policy),
        chat,
    )


def miner_settings(groups: int, chunk: int = 2) -> MinerSettings:
    """Return the settings of a simulated miner."""
    return MinerSettings(groups=groups, chunk=chunk, share=0.7, poll_seconds=0.2)


@dataclass(frozen=True)
class TrainerSettings:
    """How a simulated trainer learns, and how it publishes."""

    section: TrainerSection
    publisher: PublisherSettings


class Network:
    """A run, its store, and its nodes."""

    def __init__(
        self,
        rules: Rules,
        validators: int = 1,
        quorum: int = 1,
        policy: Path = small_policy.DIRECTORY,
        sandbox: Sandbox | None = None,
    ) -> None:
        self.clock = TrioClock(BEGIN)
        self.store = MemoryStore()
        self.logs: dict[str, Log] = {}
        self.states: dict[str, MemoryStore] = {}
        self.mediums: dict[str, ObjectStore] = {}  # of some nodes, or processes of nodes, in place of the store
        self.policy = Policy.load(policy)
        self.weights = load_weights(policy)
        self.data = rules.data.read_bytes() if rules.data else None
        self.sandbox = sandbox
        self.checkpoint_versions = 1
        self.learning_rate = 2e-5
        self.compute = self.training_compute = Compute(models.build(self.policy))
        self.computes: dict[str, Compute] = {}  # of miners and validators that compute otherwise
        self.validators = [f"validator-{number}" for number in range(validators)]
        problems = min(16, rules.evaluation_problems)  # enough for a simulation
        rules = rules.changed(quorum=quorum, evaluation_problems=problems)
        manifest = draft(rules, tuple(self.validators), policy)
        self.signed: Signed[RunManifest] = creation.sign_manifest(manifest, key("root"))

    @property
    def run(self) -> RunManifest:
        return self.signed.record

    def medium(self, name: str, process: str) -> ObjectStore:
        """Return a process's view of the shared store."""
        return self.mediums.get(name + process) or self.mediums.get(name, self.store)

    def durable(self, name: str, process: str) -> ObjectStore:
        """Return a process's view of its node's own state."""
        return self.states.setdefault(name, MemoryStore())

    def node(self, name: str, process: str = "", store: ObjectStore | None = None) -> Node:
        """Return the node of a name; the processes of a node share its state."""
        store = store if store is not None else self.medium(name, process)
        log = self.logs.setdefault(name + process, Log(name + process))
        return Node(
            run_id=self.signed.digest,
            run=self.run,
            key=key(name),
            name=name,
            store=store,
            state=self.durable(name, process),
            clock=self.clock,
            beacon=StoreBeacon(store, self.run.beacon, self.clock),
            telemetry=log,
            run_sync=inline,
        )

    def task(self, node: Node) -> Task:
        return wiring.make_task(node, self.policy, self.data, self.sandbox)

    async def run_beacon(self) -> None:
        await publish_rounds(BEACON_KEY, self.run.beacon, self.store, self.clock, keep=200)

    def amend(self, **changes: Any) -> None:
        """Change the manifest before any node has started."""
        self.signed = creation.sign_manifest(self.run.model_copy(update=changes), key("root"))

    def trainer_settings(self, groups_per_step: int = 4, canaries: int = 0, **publisher: Any) -> TrainerSettings:
        section = TrainerSection(
            groups_per_step=groups_per_step,
            checkpoint_versions=self.checkpoint_versions,
            learning_rate=self.learning_rate,
            warmup_steps=0,
            poll_seconds=0.25,
            canaries=canaries,
        )
        return TrainerSettings(section, PublisherSettings(**{"anchor_interval": 4, "part_bytes": 4096, **publisher}))

    def make_learner(self, section: TrainerSection) -> Learner:
        """Return the learner of a trainer or a site of this network."""
        settings = LearnerSettings(loss=section, optimizer=section)
        return wiring.make_learner(self.training_compute, settings, self.run.precision, self.weights)

    def trainer_processes(
        self, settings: TrainerSettings, name: str = "trainer"
    ) -> dict[str, Callable[[], Awaitable[None]]]:
        """Return the trainer's three processes by name; each call starts one."""
        node, section = partial(self.node, name), settings.section
        learner = partial(self.make_learner, section)
        return {
            "/training": lambda: wiring.run_training(node("/training"), learner, lambda: self.weights, section),
            "/upload": lambda: wiring.run_publisher(node("/upload"), settings.publisher),
            "/download": lambda: wiring.run_collector(node("/download"), section),
        }

    async def run_trainer(self, name: str = "trainer", canaries: int = 0, **publisher: Any) -> None:
        """Run the trainer's three processes as tasks."""
        settings = self.trainer_settings(canaries=canaries, **publisher)
        async with trio.open_nursery() as nursery:
            for main in self.trainer_processes(settings, name).values():
                nursery.start_soon(main)

    async def run_miner(self, name: str, groups: int = 4, producer: Any = HonestProducer) -> None:
        settings, node = miner_settings(groups), self.node(name)
        await wiring.run_miner(node, self.task(node), self.computes.get(name, self.compute), settings, producer)

    async def run_cheat(self, name: str = "cheat") -> None:
        node = self.node(name)
        await run_cheater(node, self.task(node), self.compute, miner_settings(groups=2))

    async def run_canary(self, number: int = 0) -> None:
        """Run the trainer's canary of a number, as the trainer's own node does."""
        node = replace(self.node(f"canary-{number}"), key=canary_key(key("trainer"), number))
        settings = miner_settings(groups=4, chunk=4)
        state = self.node("trainer").state
        producer = partial(CanaryProducer, trainer=key("trainer"), trainer_state=state)
        task = self.task(node)

        async def audit(engine: Engine, shares_of: SharesOf) -> None:
            await CanaryAudit(node, task, engine, key("trainer"), state, shares_of).run()

        await wiring.run_miner(node, task, self.compute, settings, producer, audit)

    async def run_validator(self, name: str = "validator-0", poll_seconds: float = 0.2) -> None:
        node = self.node(name)
        settings = ValidatorSettings(evaluate=True, poll_seconds=poll_seconds)
        await wiring.run_validator(node, self.task(node), self.computes.get(name, self.compute), settings)

    def start(self, nursery: trio.Nursery, *, miners: int = 2, canaries: int = 0) -> None:
        """Start the beacon, a trainer, the validators and honest miners."""
        nursery.start_soon(self.run_beacon)
        nursery.start_soon(self.run_trainer, "trainer", canaries)
        for name in self.validators:
            nursery.start_soon(self.run_validator, name)
        for number in range(1, miners + 1):
            nursery.start_soon(self.run_miner, f"miner-{number}")

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        """Return the fields of a process's events of one name."""
        return self.logs[name].named(event)

    async def head(self) -> Head:
        data = await self.store.get(paths.head(key("trainer").public), 1 << 20)
        return open_signed(data, Head, self.run.authority.trainers).record

    async def until_window(self, window: int) -> None:
        await self.clock.sleep_until(self.run.opening_time(window))
