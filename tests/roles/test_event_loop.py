"""Nothing that grows with the model runs on an event loop: there it would hold up the renewal of heads and all else.

The processor time of each step of each task is measured, on stores on a disk and with real threads. Work that grows
with the model takes long in every pass, while an interruption by the machine does not hit the same task each time: a
task is at fault if it has a long step in each of several passes. On one core, hashing, copying or writing the weights
of these tests once takes several times the limit.
"""

import gc
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trio

from grailnode.engine.qwen3 import Qwen3, Qwen3Config
from grailnode.engine.torch_engine import TorchEngine
from grailnode.node.telemetry import LONG_STEP_SECONDS, LoopWatch, StepReporter
from grailnode.store.local import LocalStore
from grailnode.store.state.state_store import StateStore
from protocol.digest import Weights, digest_weights
from roles.authority_updates import refresh_authority
from roles.node.identity import Node
from roles.policy.follower import Follower
from roles.policy.serving import serve
from roles.trainer.learn.learner import Learner, LearnerSettings
from roles.trainer.learn.replay_buffer import ReplayBuffer
from roles.trainer.learn.training import Training
from roles.trainer.learn.training_settings import OptimizerSettings, ReplaySettings, TrainingSettings
from roles.trainer.outer.coordinator import Coordinator, CoordinatorSettings, PublisherLink
from roles.trainer.outer.local_steps import SiteSettings
from roles.trainer.outer.site import Site
from roles.trainer.publish.history import History
from roles.trainer.publish.publisher import Publisher, PublisherSettings
from roles.trainer.spool import INBOX, list_snapshots
from roles.trainer.verified_batch import VerifiedBatch, VerifiedGroup
from tests.support.builders.chains import MINER, TRAINER, PunctualBeacon, make_node, small_run
from tests.support.builders.policies import random_weights
from tests.support.builders.samples import round_rules
from tests.support.builders.verified_batches import make_group
from tests.support.processes.programs import ROOT
from tests.support.simulation.network import Log
from tests.support.simulation.virtual_clock import TrioClock, running

VERSIONS = 2  # a patch, and a patch with an anchor
PASSES = 3
ROUND_SECONDS = 1000.0  # 4000 beacon rounds


def model_of(vocabulary: int) -> Qwen3:
    """Return a model of which nearly all is the embedding of its vocabulary."""
    return Qwen3(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            rms_norm_eps=1e-6,
            rope_theta=10_000.0,
            tie_word_embeddings=True,
        )
    )


class Machine:
    """The stores of a trainer, of a site and of a miner, and the weights of version 0."""

    def __init__(self, directory: Path, vocabulary: int) -> None:
        self.directory = directory
        self.model = model_of(vocabulary)
        self.weights: Weights = random_weights(self.model)
        run_id, run = small_run(digest_weights(self.weights))
        self.run_id, self.run = (
            run_id,
            run.model_copy(update={"authority": run.authority.model_copy(update={"workers": (MINER.public,)})}),
        )

    def node(self, name: str) -> Node:
        key = TRAINER if name == "trainer" else MINER
        store, state = LocalStore(self.directory / "store"), StateStore(self.directory / name, self.run_id)
        node = make_node(self.run_id, self.run, store, state, Log(name), key, clock=TrioClock(1_750_000_000.0))
        return replace(node, run_sync=trio.to_thread.run_sync, beacon=PunctualBeacon())

    async def train(self) -> object:
        node, learner = self.node("trainer"), await self.learner()
        buffer = ReplayBuffer(ReplaySettings(decay=0.7, max_staleness=1000, max_uses=1000), 0)
        buffer.add(group())
        settings = TrainingSettings(
            groups_per_step=1, steps_per_version=1, training_steps=VERSIONS, checkpoint_versions=1, file_bytes=1 << 23
        )
        training = Training(node, learner, buffer, lambda: self.weights, settings)
        await _until(training.run, lambda: _has_snapshots(node))
        return learner  # whose memory is given back after the last step

    async def publish(self) -> None:
        node = self.node("trainer")
        await refresh_authority(node)
        history = await History.open(node.state)
        publisher = Publisher(node, history, PublisherSettings(anchor_interval=2, takeover_seconds=0.01))
        await _until(publisher.run, lambda: _is_published(history))

    async def close_rounds(self) -> object:
        """Coordinate a site, and be it: a round of one stream of the weights, and then one of the other. Each is over
        when its contribution is in storage, however long that takes.
        """
        clock = RoundClock(self.directory / "store" / MINER.public.hex())
        trainer, worker = (replace(self.node(name), clock=clock) for name in ("trainer", "site"))
        learner = await self.learner()
        rules = round_rules(local_steps=1, quorum=1, streams=2)

        async def genesis() -> tuple[int, Weights]:
            return 0, self.weights

        link = PublisherLink(trio.lowlevel.checkpoint, lambda: 1, genesis)
        coordinator = Coordinator(trainer, CoordinatorSettings(rules, beacon_rounds=4000), link)
        site = await trio.to_thread.run_sync(Site, worker, learner, SiteSettings(groups_per_step=1, upload_seconds=0.5))
        batch = VerifiedBatch(window=0, miner=bytes(32), groups=tuple(group(number) for number in range(20)))
        await worker.state.put(f"{INBOX}{0:010d}-{'0' * 64}", batch.to_bytes())
        async with running(coordinator.run):
            await _until(site.run, lambda: _has_applied(site, 2))
        return coordinator, site  # whose memory is given back after the last step

    async def learner(self) -> Learner:
        settings = LearnerSettings(optimizer=OptimizerSettings(learning_rate=1e-4, warmup_steps=0))
        learner: Learner = await trio.to_thread.run_sync(Learner, self.model, self.weights, settings)
        return learner

    async def follow(self) -> None:
        node = self.node("miner")
        await refresh_authority(node)
        follower = await Follower(node).open()
        engine = TorchEngine(self.model, dtype=torch.bfloat16, run_sync=trio.to_thread.run_sync)
        await follower.refresh()
        for version in (0, VERSIONS):
            await serve(node, engine, await follower.rebuild(version))


class RoundClock:
    """A clock that jumps to the end of a round when a contribution comes into a space."""

    def __init__(self, space: Path) -> None:
        self._space = space
        self._clock = TrioClock(1_750_000_000.0)

    def now(self) -> float:
        return self._clock.now() + ROUND_SECONDS * len(list(self._space.glob("contributions/*")))

    async def sleep_until(self, moment: float) -> None:
        while self.now() < moment:
            await trio.sleep(0.05)


def group(number: int = 0) -> VerifiedGroup:
    logprobs = [torch.full((2,), -1.0)] * 2
    return make_group(bytes([number]) * 32, 0, (5, 6, 7), ((3, 1), (4, 1)), logprobs, (1.0, 0.0))


async def _has_applied(site: Site, step: int) -> bool:
    return site.shared is not None and site.shared.step >= step


async def _has_snapshots(node: Node) -> bool:
    return len(await list_snapshots(node.state)) > VERSIONS


async def _is_published(history: History) -> bool:
    return history.published_version >= VERSIONS and not history.incomplete_anchors()


async def _until(work: Callable[[], Awaitable[None]], is_done: Callable[[], Awaitable[bool]]) -> None:
    """Run work until something is so, and cancel it."""
    with trio.fail_after(600):
        async with running(work):
            while not await is_done():
                await trio.sleep(0.05)
            await trio.sleep(0.2)


def measure(directory: Path, vocabulary: int = 60_000) -> dict[str, set[str]]:
    """Return the names of the tasks that had a long step, by role; the weights of 60,000 tokens have 33 MB."""
    machine, result = Machine(directory, vocabulary), {}
    for work in (machine.train, machine.publish, machine.close_rounds, machine.follow):
        names: set[str] = set()

        def report(task: str, seconds: float, names: set[str] = names) -> None:
            names.add(task)

        gc.collect()
        gc.disable()  # its pauses are as long as this session has objects
        try:
            trio.run(work, instruments=[LoopWatch(report, LONG_STEP_SECONDS)])
        finally:
            gc.enable()
        result[work.__name__] = names
    return result


@pytest.mark.slow
def test_no_step_on_the_event_loop_grows_with_the_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    measure(tmp_path_factory.mktemp("warm-up"), 1000)  # compiles kernels, and imports what is imported late
    suspects = measure(tmp_path_factory.mktemp("site"))
    for _ in range(PASSES - 1):
        if any(suspects.values()):
            again = measure(tmp_path_factory.mktemp("site"))
            suspects = {role: names & again[role] for role, names in suspects.items()}
    assert suspects == {"train": set(), "publish": set(), "close_rounds": set(), "follow": set()}


def test_what_a_window_needs_is_loaded_before_processes_are_forked():
    """A full pass of the garbage collector took 22 ms over what was loaded later, in the step of whatever task."""
    work = (
        "import gc, torch\n"
        "from protocol.rollout import sampling, sketch\n"
        "sketch.commit('projection', torch.ones(4, 64), bytes(32))\n"
        "sampling.log_probabilities(torch.ones(4, 64), torch.arange(4), 1.0)\n"
        "print(len(gc.get_objects()))\n"
    )
    load = (
        "import gc, importlib\n"
        "from grailnode.node.supervisor import PRELOADED\n"
        "[importlib.import_module(name) for name in PRELOADED]\n"
        "gc.freeze()\n"
    )
    # The first process may compile the kernels, which loads the compiler.
    _, objects = (
        int(subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout)
        for script in (work, load + work)
    )
    assert objects < 10_000


def test_a_long_step_is_reported():
    steps = []

    async def compute() -> None:
        torch.rand(1 << 23).sort()
        await trio.lowlevel.checkpoint()

    trio.run(compute, instruments=[LoopWatch(lambda task, seconds: steps.append(task), LONG_STEP_SECONDS)])
    assert any("compute" in task for task in steps)


def test_what_a_process_computed_before_it_is_watched_is_no_step():
    steps = []

    async def begin() -> None:
        trio.lowlevel.add_instrument(LoopWatch(lambda task, seconds: steps.append(task), LONG_STEP_SECONDS))
        await trio.lowlevel.checkpoint()

    assert time.thread_time() > LONG_STEP_SECONDS
    trio.run(begin)
    assert steps == []


def test_long_steps_are_one_event_a_minute_with_the_longest_of_them():
    log, now = Log("node"), [0.0]
    report = StepReporter(log, lambda: now[0])
    for moment, task, seconds in ((0.0, "a", 0.03), (10.0, "b", 0.05), (20.0, "c", 0.04), (61.0, "d", 0.025)):
        now[0] = moment
        report(task, seconds)
    reports = [fields for name, fields in log.events if name == "event-loop-blocked"]
    assert reports == [{"task": "a", "seconds": 0.03, "steps": 1}, {"task": "b", "seconds": 0.05, "steps": 3}]
