"""Sites and their coordinator over a store in memory, on trio's virtual clock, with a small learner of their own."""

import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import trio
from torch import Tensor

from grailnode.run import authority_changes, authority_drafts
from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.digest import Weights, digest_weights
from protocol.identity.signing import Signed, SigningKey
from protocol.outer.local_work import MASTER
from protocol.outer.round_records import RoundContribution, RoundManifest, RoundRules
from protocol.outer.shared_state import SharedState
from protocol.pseudogradient import Payload, in_memory
from roles.node.identity import Node
from roles.ports import NotFoundError, ObjectStore
from roles.records import fetch_record
from roles.trainer.outer.coordinator import Coordinator, CoordinatorSettings, PublisherLink
from roles.trainer.outer.local_steps import SiteSettings
from roles.trainer.outer.round_reader import FetchedFiles, fetch_payloads
from roles.trainer.outer.site import Site
from roles.trainer.spool import INBOX
from roles.trainer.verified_batch import VerifiedBatch, VerifiedGroup
from tests.support.builders.chains import TRAINER, make_node, small_run
from tests.support.builders.samples import round_rules
from tests.support.builders.verified_batches import make_group
from tests.support.faults.crash_trigger import CrashingStore, CrashTrigger, cancelling
from tests.support.simulation.network import BEGIN, Log, key
from tests.support.simulation.recording_store import RecordingStore
from tests.support.simulation.virtual_clock import TrioClock, running

SHAPES = {"embed": (12, 40), "layer.weight": (40, 64), "norm": (40,)}
ROUND_SECONDS = 5.0  # 20 beacon rounds of 250 ms
SITE_SETTINGS = SiteSettings(groups_per_step=1, upload_seconds=1.0, poll_seconds=0.25)


def random_weights(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    random = np.random.default_rng(seed)
    return {name: torch.from_numpy(random.standard_normal(shape) * 0.05).to(dtype) for name, shape in SHAPES.items()}


def first_weights() -> dict[str, Tensor]:
    """Return the policy with which a simulated run begins: BF16."""
    return random_weights(0, torch.bfloat16)


def target_weights() -> dict[str, Tensor]:
    """Return the weights at which the loss of `SmallLearner` is zero."""
    return random_weights(1, torch.float32)


class SmallLearner:
    """A learner with momentum that walks towards the target; each group adds a noise of its own.

    Attributes:
        begins, ends: its weights after so many steps, when it was restored and when its state was asked for; the last
            ones, if it took the steps again.
        direction: 1; -1 for a learner that is poisoned.
    """

    def __init__(self, direction: float = 1.0) -> None:
        self._target = target_weights()
        self.direction = direction
        self.begins: dict[int, dict[str, Tensor]] = {}
        self.ends: dict[int, dict[str, Tensor]] = {}
        self.start_again()

    def start_again(self) -> None:
        """Become a new learner, as in a new process."""
        self._weights = {name: tensor.to(torch.float32) for name, tensor in first_weights().items()}
        self._moments = {name: torch.zeros_like(tensor) for name, tensor in self._weights.items()}
        self._steps = 0

    def step(self, groups: Sequence[VerifiedGroup]) -> SimpleNamespace:
        self._steps += 1
        for group in groups:
            generator = torch.Generator().manual_seed(int.from_bytes(group.digest[:7], "little"))
            for name, weight in self._weights.items():
                noise = torch.randn(weight.shape, generator=generator) * 0.02
                gradient = self.direction * (weight - self._target[name] + noise)
                self._moments[name] = self._moments[name] * 0.5 + gradient * 0.5
                self._weights[name] = weight - 0.1 * self._moments[name]
        return SimpleNamespace(loss=loss(self._weights), grad_norm=0.0, reward=0.0)

    def state(self) -> dict[str, Tensor]:
        self.ends[self._steps] = dict(self._weights)
        own = {MASTER + name: tensor.clone() for name, tensor in self._weights.items()}
        moments = {f"moment/{name}": tensor.clone() for name, tensor in self._moments.items()}
        return own | moments | {"steps": torch.tensor(self._steps, dtype=torch.int64)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._weights = {name: state[MASTER + name].clone() for name in SHAPES}
        self._moments = {name: state[f"moment/{name}"].clone() for name in SHAPES}
        self._steps = int(state["steps"])
        self.begins[self._steps] = dict(self._weights)


def loss(weights: Weights) -> float:
    """Return the mean squared distance from the target."""
    target = target_weights()
    squares = [float(((weights[name].float() - target[name]) ** 2).sum()) for name in target]
    return sum(squares) / sum(tensor.numel() for tensor in target.values())


def groups(number: int, count: int, version: int = 0, seed: int = 0) -> VerifiedBatch:
    """Return a batch of groups whose digests depend on the number and the seed."""
    digests = [hashlib.sha256(f"group {seed} {number} {place}".encode()).digest() for place in range(count)]
    made = [make_group(digest, version, [0], [[0], [0]], [torch.zeros(1)] * 2, [1.0, 0.0]) for digest in digests]
    return VerifiedBatch(window=number, miner=bytes(32), groups=tuple(made))


@dataclass
class SiteHandle:
    """A site of the testbed, with its state and log."""

    name: str
    state: MemoryStore
    log: Log
    learner: SmallLearner
    site: Site | None = None

    @property
    def key(self) -> SigningKey:
        return key(self.name)


class OuterTestbed:
    """A run with some sites.

    Args:
        seed: of the groups, and so of what the learners see and of who gets which.
    """

    def __init__(self, sites: int = 3, rules: RoundRules | None = None, *, seed: int = 0, **settings: Any) -> None:
        self._seed = seed
        self.store, self.clock = RecordingStore(), TrioClock(BEGIN)
        self.names = [f"site-{number}" for number in range(sites)]
        run_id, run = small_run(digest_weights(first_weights()))
        workers = tuple(sorted(key(name).public for name in self.names))
        authority = run.authority.model_copy(update={"workers": workers})
        self.run_id, self.run = run_id, run.model_copy(update={"authority": authority})
        rules = rules or round_rules(local_steps=3, quorum=2)
        self.settings = replace(
            CoordinatorSettings(
                rules=rules,
                beacon_rounds=20,
                payload_seconds=2.0,
                state_interval=4,
                shard_bytes=5000,
                poll_seconds=0.25,
            ),
            **settings,
        )
        self.coordinator_log, self.coordinator_state, self.trainer = Log("trainer"), MemoryStore(), TRAINER
        self.epoch, self._revisions = 1, list[bytes]()
        self.site_settings = SITE_SETTINGS
        self.handles = {name: self.handle(name) for name in self.names}
        self._batches = 0

    def handle(self, name: str) -> SiteHandle:
        """Return a new site, which has an empty state."""
        return SiteHandle(name, MemoryStore(), Log(name), SmallLearner())

    def node(self, log: Log, state: ObjectStore, signing_key: SigningKey, store: ObjectStore | None = None) -> Node:
        node = make_node(self.run_id, self.run, store or self.store, state, log, signing_key, clock=self.clock)
        for number, data in enumerate(self._revisions, 1):
            node.revisions.adopt(node.revisions.check(number, data))
        return node

    def rotate_trainer(self) -> None:
        """Give the trainer a new key, as `grailnode keys rotate` and a restart do."""
        revisions, old, self.trainer = (
            self.node(Log(""), MemoryStore(), key("root")).revisions,
            self.trainer,
            key("rotated"),
        )
        self.epoch += 1
        changes = authority_changes.replacement(revisions.current, old.public, self.trainer.public)
        self._revisions.append(authority_drafts.propose(revisions, "", **changes).signed_by(key("root")).envelope())

    async def run_coordinator(self, state: ObjectStore | None = None, store: ObjectStore | None = None) -> None:

        async def check_fence() -> None:
            await trio.lowlevel.checkpoint()

        async def genesis() -> tuple[int, Weights]:
            await trio.lowlevel.checkpoint()
            return 0, first_weights()

        link = PublisherLink(check_fence, lambda: self.epoch, genesis)
        node = self.node(self.coordinator_log, state or self.coordinator_state, self.trainer, store)
        await Coordinator(node, self.settings, link).run()

    async def run_killed(
        self, run: Callable[[ObjectStore, ObjectStore], Awaitable[None]], state: ObjectStore, trigger: CrashTrigger
    ) -> None:
        """Run a process until the trigger kills it, and then start it again, for ever.

        Args:
            run: takes the process's state and the shared store.
        """
        with trio.CancelScope() as scope:
            trigger.crash = cancelling(scope)
            await run(CrashingStore(state, trigger), CrashingStore(self.store, trigger))
        await trio.sleep(0.5)
        await run(state, self.store)

    async def run_site(
        self, handle: SiteHandle, state: ObjectStore | None = None, store: ObjectStore | None = None
    ) -> None:
        node = self.node(handle.log, state or handle.state, handle.key, store)
        handle.learner.start_again()
        handle.site = Site(node, handle.learner, self.site_settings)
        await handle.site.run()

    async def feed(self, per_second: int = 8) -> None:
        """Give every site the same new groups each second, for ever."""
        while True:
            await self.feed_once(per_second)
            await trio.sleep(1.0)

    async def feed_once(self, count: int) -> None:
        """Give every site some new groups of the newest version."""
        self._batches += 1
        version = max([0, *(event["version"] for event in self.coordinator_log.named("round-closed"))])
        data = groups(self._batches, count, version, self._seed).to_bytes()
        for handle in self.handles.values():
            await handle.state.put(f"{INBOX}{self._batches:010d}-{'0' * 64}", data)

    @asynccontextmanager
    async def running(
        self, names: Sequence[str] | None = None, *, store: ObjectStore | None = None, per_second: int = 8
    ) -> AsyncIterator[trio.Nursery]:
        """Run the coordinator, the source of groups and some of the sites (by default all) until the end of a block.

        Args:
            store: as the coordinator sees it; per_second: new groups.
        """
        async with running(self.feed, per_second) as nursery:
            nursery.start_soon(self.run_coordinator, None, store)
            for name in self.names if names is None else names:
                nursery.start_soon(self.run_site, self.handles[name])
            yield nursery

    async def run_rounds(self, newest: int) -> list[RoundManifest]:
        """Run everything until half a round after the end of a round; return all manifests."""
        async with self.running():
            await self.until_round(newest)
            await trio.sleep(ROUND_SECONDS / 2)
        return await self.manifests()

    async def manifest(self, number: int) -> RoundManifest:
        node = self.node(Log("reader"), MemoryStore(), key("reader"))
        return (await fetch_record(node, RoundManifest, paths.round_manifest(self.trainer.public, number))).record

    async def manifests(self) -> list[RoundManifest]:
        result: list[RoundManifest] = []
        while True:
            try:
                result.append(await self.manifest(len(result)))
            except NotFoundError:
                return result

    async def contribution(self, name: str, number: int) -> Signed[RoundContribution]:
        """Return the contribution of a site to a round."""
        node = self.node(Log("reader"), MemoryStore(), key("reader"))
        return await fetch_record(node, RoundContribution, paths.contribution(key(name).public, number))

    async def payloads(self, manifest: RoundManifest, shared: SharedState, rules: RoundRules) -> list[Payload]:
        """Return the payloads of a round that began with a state and rules."""
        node, parts = self.node(Log("reader"), MemoryStore(), key("reader")), shared.stream_parts(rules)
        fetched = FetchedFiles(in_memory)
        return await fetch_payloads(node, manifest.trainer, manifest.number, manifest.counted, parts, fetched)

    async def until_round(self, number: int) -> RoundManifest:
        """Wait until a round is closed, and return its manifest."""
        while True:
            try:
                return await self.manifest(number)
            except NotFoundError:
                await trio.sleep(0.25)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await trio.sleep(0.25)

    @property
    def rewritten(self) -> set[str]:
        """The paths of the signed objects that were replaced, though nobody may replace them."""
        puts = {
            (put.path, put.data) for put in self.store.puts if "/rounds/" in put.path or "/contributions/" in put.path
        }
        return {path for path, count in Counter(path for path, _ in puts).items() if count > 1}

    def reasons(self, manifest: RoundManifest) -> dict[str, str]:
        """Return why sites were refused, by name."""
        names = {key(name).public: name for name in self.names}
        return {names[item.worker]: item.reason for item in manifest.refused}

    def remaining_loss(self, name: str) -> float:
        """Return the loss of the shared weights that a site has, as a share of the first weights' loss."""
        site = self.handles[name].site
        assert site is not None and site.shared is not None
        return loss(site.shared.weights) / loss(first_weights())

    def applied(self, name: str) -> dict[int, str]:
        """Return the digest of the state after each round, as a site computed it."""
        return {event["number"]: event["state"] for event in self.handles[name].log.named("round-applied")}


def equal_states(testbed: OuterTestbed, rounds: int) -> None:
    """Check that all sites that applied a round have the same state after it, and that all applied some rounds."""
    tables = [testbed.applied(name) for name in testbed.names]
    assert len(set.intersection(*map(set, tables))) >= rounds
    for number in set.union(*map(set, tables)):
        assert len({table[number] for table in tables if number in table}) == 1, number
