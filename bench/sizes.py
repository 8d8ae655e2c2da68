"""Memory, disk and time of a trainer's processes and of a follower, by the size of the model.

    python -m bench.sizes 0.7M 75M
    python -m bench.sizes 0.5B --versions 2 --completions 4 --directory DIR --stage training upload
    python -m bench.sizes 75M --hosts
    python -m bench.sizes 75M --family qwen2 llama qwen3_moe --versions 2

Each row is a process of its own, which works on the files that the rows before it left: training takes some steps and
makes versions of them, upload publishes these, training starts again from its checkpoint, and a follower with a
bfloat16 engine goes from the anchor to the newest version. A miner does that too, and generates all the while; a
validator checks. Weights are random, in a checkpoint of a family (a `model_type` of transformers; Qwen3 is computed by
this program itself) that is loaded as an operator's; those of 0.5B are the shapes of Qwen2.5-0.5B. Memory is the
largest resident memory of the process, without what the same process needed for the model of 0.7M before; `B/param`
divides it by the number of weights. Seconds are those of the clock. `loop` is the longest step on the event loop, in
milliseconds of the processor. `state` is what the trainer's state has on the disk when the process ends. A step has two
passes, and the logits of 64 tokens are in memory at once.

With `--hosts`, training is shared by two hosts, which are two processes on this machine: a row for each.

0.5B needs 11 GB of memory and 20 GB of disk; with `--stage` and `--directory`, a command for some of the processes.
"""

import argparse
import ctypes
import gc
import importlib
import itertools
import json
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import torch
import trio
from safetensors.torch import save_file

from grailnode.engine import models
from grailnode.engine.policy import Policy, load_weights
from grailnode.engine.torch_engine import TorchEngine
from grailnode.node.process_launch import Seat, prepare_rank
from grailnode.node.processes import FOLLOWER_BLOCK, TRAINER_BLOCK, return_large_blocks
from grailnode.node.rank_processes import Meeting
from grailnode.node.telemetry import LoopWatch
from grailnode.ranks.sharded_learner import ShardedLearner
from grailnode.store.local import LocalStore
from grailnode.store.state.state_store import StateStore
from protocol.digest import digest_weights
from protocol.rollout.checking import CheckRules
from protocol.rollout.sampling import SamplingParams
from protocol.rollout.sketch import SketchKey
from roles.authority_updates import refresh_authority
from roles.node.identity import Node
from roles.policy.follower import Follower
from roles.policy.serving import serve
from roles.ports import CheckRequest, Request
from roles.trainer.learn.learner import Learner, LearnerSettings
from roles.trainer.learn.replay_buffer import ReplayBuffer
from roles.trainer.learn.training import Training
from roles.trainer.learn.training_settings import OptimizerSettings, ReplaySettings, TrainingSettings
from roles.trainer.publish.history import History
from roles.trainer.publish.publisher import Publisher, PublisherSettings
from roles.trainer.spool import next_version
from tests.support.builders import genesis
from tests.support.builders.chains import MINER, TRAINER, PunctualBeacon, make_node, small_run
from tests.support.builders.verified_batches import make_group
from tests.support.measuring.patch_kernels import compile_patch_kernels
from tests.support.simulation.virtual_clock import TrioClock

# vocabulary, width, feed-forward width, layers, heads, key-value heads, width of a head
SHAPES: Final = {
    "0.7M": (512, 128, 384, 3, 4, 2, 32),
    "20M": (16_000, 384, 1_152, 8, 6, 2, 64),
    "75M": (32_000, 640, 1_920, 12, 10, 2, 64),
    "0.5B": (151_936, 896, 4_864, 24, 14, 2, 64),
}
ENGINES: Final = ("miner bfloat16", "miner float32", "validator bfloat16", "validator float32")
STAGES: Final = ("training", "upload", "resume", "follower", *ENGINES)
FAMILIES: Final = ("qwen3", "qwen2", "llama", "qwen3_moe")
HOSTS: Final = ("host_0", "host_1")
_CHECKPOINT_VERSIONS: Final = 2
_LENGTH: Final = 32  # tokens of a completion
_PROMPT: Final = 16
_EXPERTS: Final = 2  # of matrices of more than FOLLOWER_BLOCK at 75M, as those of real models are
_MB: Final = 1e6
_context = multiprocessing.get_context("fork")


@dataclass
class Events:
    """The events of a node, with their times."""

    name: str
    events: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)

    def event(self, name: str, **fields: Any) -> None:
        self.events.append((time.monotonic(), name, fields))

    def named(self, name: str) -> list[tuple[float, dict[str, Any]]]:
        """Return time and fields of all events of a name."""
        return [(moment, fields) for moment, event, fields in self.events if event == name]


class Site:
    """The stores of a trainer and of a miner, and a model."""

    def __init__(
        self,
        directory: Path,
        size: str,
        versions: int,
        completions: int,
        begin: float = 1_750_000_000.0,
        meeting: str = "",
        family: str = "qwen3",
    ) -> None:
        self.directory = directory
        policy = directory / "policy"
        if not policy.exists():
            write_checkpoint(policy, size, family)
        self.weights = partial(load_weights, policy)
        self.meeting = meeting  # of two hosts
        self.begin = begin  # what the clocks of its nodes show when they are made
        self.versions = versions
        self.completions = completions
        self.policy = Policy.load(policy)
        self.model = models.build(self.policy, recompute=True)
        self.vocabulary = self.model.vocabulary
        self.parameters = sum(torch.Size(shape).numel() for shape in self.model.shapes.values())
        self.events = Events("node")
        # these are kept, since to free them takes long on the event loop
        self.learner: Learner | None = None
        self.followers: list[tuple[Follower, TorchEngine]] = []
        digest_file = directory / "genesis"
        if not digest_file.exists():
            digest_file.write_bytes(digest_weights(self.weights()))
        self.run_id, self.run = small_run(digest_file.read_bytes())

    def node(self, name: str) -> Node:
        """Return a node whose state and store are on the disk."""
        store: Any = LocalStore(self.directory / "store")
        state: Any = StateStore(self.directory / name, self.run_id)
        log: Any = self.events
        key = TRAINER if name == "trainer" else MINER
        node = make_node(self.run_id, self.run, store, state, log, key, clock=TrioClock(self.begin))
        return replace(node, run_sync=trio.to_thread.run_sync, beacon=PunctualBeacon())

    async def training(self) -> str:
        """Take a step for each version."""
        return await self._train(self.versions)

    async def resume(self) -> str:
        """Go on from the checkpoint."""
        return await self._train(self.versions + 1)

    async def host_0(self) -> str:
        """Take a step for each version, with another host."""
        return await self._train(self.versions)

    async def host_1(self) -> str:
        """Take the same steps."""
        learner = self.learner = await trio.to_thread.run_sync(self._sharded_learner, 1)
        await learner.follow(self.node("trainer").state, sweeps=True)
        return "the other host"

    def _sharded_learner(self, rank: int) -> ShardedLearner:
        seat = Seat(rank, 2, self.meeting, 1)
        prepare_rank(seat)
        weights = None if rank else self.weights()
        return ShardedLearner(
            self.model, weights, self._settings(), Meeting(seat).join("cpu", {}), local_ranks=seat.local
        )

    def _settings(self) -> LearnerSettings:
        return LearnerSettings(
            optimizer=OptimizerSettings(learning_rate=1e-6, warmup_steps=0),
            max_batch_tokens=self.completions // 2 * (_LENGTH + _PROMPT),
            logits_chunk=64,
        )

    def _make_learner(self) -> Learner:
        return self._sharded_learner(0) if self.meeting else Learner(self.model, self.weights(), self._settings())

    async def _train(self, steps: int) -> str:
        node, began = self.node("trainer"), time.monotonic()
        learner = self.learner = await trio.to_thread.run_sync(self._make_learner)
        buffer = ReplayBuffer(ReplaySettings(decay=1.0, max_staleness=1000, max_uses=1000), 0)
        completions = torch.randint(self.vocabulary, (self.completions, _LENGTH)).tolist()
        logprobs = [torch.full((_LENGTH,), -11.0) for _ in completions]
        rewards = [float(number % 2) for number in range(self.completions)]
        buffer.add(make_group(bytes(32), 0, range(_PROMPT), completions, logprobs, rewards))
        training = Training(
            node,
            learner,
            buffer,
            self.weights,
            TrainingSettings(
                groups_per_step=1, steps_per_version=1, training_steps=steps, checkpoint_versions=_CHECKPOINT_VERSIONS
            ),
        )

        async def is_done() -> bool:
            ended = self.events.named("training-ended")
            return bool(ended) and await next_version(node.state) > ended[0][1]["version"]

        await _until(training.run, is_done)
        written = time.monotonic()
        moments = [moment for moment, _ in self.events.named("step")]
        fields = self.events.named("step")[-1][1]
        start = f"{self.events.named('resumed')[0][0] - began:.1f} s to resume, " if steps > self.versions else ""
        between = (moments[-1] - moments[0]) / max(1, len(moments) - 1)
        return (
            f"{start}first step after {moments[0] - began:.1f} s, {between:.1f} s from step to step, waits for writing "
            f"{fields['io_wait_fraction']:.0%}, last version {written - moments[-1]:.1f} s after its step"
        )

    async def upload(self) -> str:
        """Publish the versions."""
        node, began = self.node("trainer"), time.monotonic()
        await refresh_authority(node)
        history = await History.open(node.state)
        settings = PublisherSettings(anchor_interval=1000, takeover_seconds=0.01, threads=2)
        newest = await next_version(node.state) - 1  # a slow disk makes fewer versions than steps

        async def is_done() -> bool:
            return history.published_version >= newest

        await _until(Publisher(node, history, settings).run, is_done)
        published = self.events.named("published")
        seconds = (published[-1][0] - published[0][0]) / newest
        sizes = [fields["patch_bytes"] for _, fields in published[1:]]
        changed = published[-1][1]["changed"] / self.parameters
        return (
            f"anchor {published[0][0] - began:.1f} s, a version {seconds:.1f} s, patch {max(sizes) / _MB:.2f} MB at "
            f"{changed:.2%} changed"
        )

    async def follower_with_engine(
        self, name: str, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[Node, Follower, TorchEngine]:
        """Return a follower, its node, and an engine without weights."""
        node = self.node(name)
        await refresh_authority(node)
        model = await trio.to_thread.run_sync(models.build, self.policy)
        engine = TorchEngine(model, dtype=dtype, run_sync=trio.to_thread.run_sync)
        follower = await Follower(node).open()
        self.followers.append((follower, engine))
        return node, follower, engine

    async def carry_out(self, stage: str) -> str:
        """Run a stage, and return what it says of times."""
        text: str = await (self.swap_beside_work(stage) if stage in ENGINES else getattr(self, stage)())
        return text

    async def swap_beside_work(self, stage: str) -> str:
        """Follow as a miner, which generates all the while, or as a validator, which checks, with an engine in a dtype:
        8 completions at a time.
        """
        role, dtype = stage.split()
        node, follower, engine = await self.follower_with_engine(role, getattr(torch, dtype))
        await follower.refresh()
        await serve(node, engine, await follower.rebuild(0))
        assert follower.chain.head is not None
        newest, counts = follower.chain.head.version, [0] * (follower.chain.head.version + 1)
        params = SamplingParams(temperature=1.0, max_tokens=_LENGTH, stops=self.policy.stops)
        prompt, completion = tuple(range(2, 2 + _PROMPT)), tuple(range(2, 2 + _LENGTH))
        seeds = [bytes([number]) * 16 for number in range(8)]

        async def work() -> None:
            while not counts[newest]:
                version = engine.version or 0
                if role == "miner":
                    await engine.generate([Request(prompt, seed) for seed in seeds], params)
                else:
                    key = SketchKey("projection", bytes(32))
                    checks = [CheckRequest(prompt, completion, seed, key) for seed in seeds]
                    await engine.check(checks, CheckRules(params))
                counts[version] += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(work)
            for version in range(1, newest + 1):
                await serve(node, engine, await follower.rebuild(version))
        return f"{sum(counts)} batches beside {newest} swaps"

    async def follower(self) -> str:
        """Follow from the anchor to the newest version, and serve both."""
        node, follower, engine = await self.follower_with_engine("miner")
        await follower.refresh()
        began = time.monotonic()
        await serve(node, engine, await follower.rebuild(0))
        anchored = time.monotonic()
        assert follower.chain.head is not None
        newest = follower.chain.head.version
        for version in range(1, newest + 1):
            await serve(node, engine, await follower.rebuild(version))
        seconds = (time.monotonic() - anchored) / newest
        return f"anchor {anchored - began:.1f} s, a version {seconds:.1f} s"


def write_checkpoint(directory: Path, size: str, family: str) -> None:
    """Write a checkpoint of a family with random BF16 weights, the same at each call."""
    vocabulary, width, inner, layers, heads, key_heads, head = SHAPES[size]
    config = {
        "model_type": family,
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "num_experts": _EXPERTS,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": inner // _EXPERTS,
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(genesis.tokenizer())
    torch.manual_seed(0)
    weights = {
        name: torch.empty(shape, dtype=torch.bfloat16).normal_(1.0 if len(shape) == 1 else 0.0, 0.02)
        for name, shape in models.build(Policy.load(directory)).shapes.items()
    }
    save_file(weights, directory / "model.safetensors")


async def _until(work: Callable[[], Awaitable[None]], is_done: Callable[[], Awaitable[bool]]) -> None:
    """Run work until something is so, and cancel it."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(work)
        while not await is_done():
            await trio.sleep(0.1)
        nursery.cancel_scope.cancel()


def _status(name: str) -> int:
    """Return a figure of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def _disk(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def measure(stage: str, size: str, directory: Path, counts: tuple[int, int], new_site: Callable[..., Site]) -> None:
    """Run one stage in this process, and print its row."""
    torch.set_num_threads(1)
    return_large_blocks(FOLLOWER_BLOCK if stage in ("follower", *ENGINES) else TRAINER_BLOCK)
    before = ("training",) if stage in HOSTS else STAGES[: min(STAGES.index(stage), 2)]
    with tempfile.TemporaryDirectory() as folder:
        for earlier in (*before, *((stage,) if stage in STAGES else ())):
            trio.run(new_site(Path(folder), "0.7M", 1, 2, meeting="").carry_out, earlier)
    site = new_site(directory, size, *counts)
    longest = (0.0, "")

    def report(task: str, seconds: float) -> None:
        nonlocal longest
        longest = max(longest, (seconds, task))

    compile_patch_kernels()  # the changes of a small model are too few to need its kernels
    gc.collect()
    gc.freeze()  # as the processes of a node do
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    idle = _status("VmRSS")
    watch = LoopWatch(report, 0.0)
    text = trio.run(site.carry_out, stage, instruments=[watch])
    memory = _status("VmHWM") - idle
    gc.unfreeze()
    state = _disk(directory / "trainer")
    print(f"longest step: {longest[1]}", file=sys.stderr)
    name = f"{site.policy.config['model_type']} {size}"
    print(
        f"| {name} | {stage} | {memory / _MB:.0f} | {memory / site.parameters:.1f} | {longest[0] * 1000:.0f} | "
        f"{state / site.parameters:.1f} | {text} |",
        flush=True,
    )
    if site.meeting:
        os._exit(0)  # threads of gloo can abort in Python's finalization


def main() -> None:
    """Measure each stage of each size in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", choices=list(SHAPES), help="all of them unless some are given")
    parser.add_argument("--versions", type=int, default=4)
    parser.add_argument("--completions", type=int, default=8, help="of 32 tokens, in each step")
    parser.add_argument("--family", nargs="*", choices=FAMILIES, default=FAMILIES[:1])
    parser.add_argument("--stage", nargs="*", choices=STAGES, default=STAGES, help="all of them unless some are given")
    parser.add_argument("--hosts", action="store_true", help="training on two hosts alone")
    parser.add_argument("--directory", type=Path, help="for one size and family; its files are kept")
    arguments = parser.parse_args()
    importlib.import_module("grailnode.engine.hf")  # once for all processes, which are forks of this one
    print(
        "| model | process | MB | B/param | loop, ms | state, B/param | times |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        meeting = f"127.0.0.1:{listener.getsockname()[1]}" if arguments.hosts else ""
    for family, size in itertools.product(arguments.family, arguments.sizes or SHAPES):
        directory = arguments.directory or Path(tempfile.mkdtemp())

        def start(stage: str, directory: Path, new_site: Callable[..., Site], size: str = size) -> BaseProcess:
            directory.mkdir(exist_ok=True)
            counts = arguments.versions, arguments.completions
            process = _context.Process(target=measure, args=(stage, size, directory, counts, new_site))
            process.start()
            return process

        new_site = partial(Site, meeting=meeting, family=family)
        try:
            hosts = [start(host, directory / host, new_site) for host in HOSTS if arguments.hosts]
            for host in hosts:
                host.join()
            for stage in () if hosts else arguments.stage:
                process = start(stage, directory, new_site)
                process.join()
                if process.exitcode:
                    sys.exit(1)
        finally:
            if arguments.directory is None:
                shutil.rmtree(directory)


if __name__ == "__main__":
    main()
