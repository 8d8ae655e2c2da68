"""A trainer whose training loop is another program: it publishes versions and learns from verified groups.

The node itself, which uploads and downloads, is a `grailnode --role trainer` with `trainer.external`. It is started
here unless it runs already, and may outlive this process: what was published is uploaded all the same.
"""

import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Final, TypeVar

import numpy as np
import torch
import trio
from torch import Tensor
from torch import distributed as dist

from grailnode import UserError
from grailnode.config import Config
from grailnode.engine import models
from grailnode.engine.lora_model import published_adapters, read_adapters
from grailnode.engine.policy import Policy, load_weights, published_names
from grailnode.library.progress import Report, progress, report_to_stderr
from grailnode.node.node_makers import make_node, state_directory
from grailnode.node.role_checks import check_start
from grailnode.node.run_model import genesis_reader, policy_directory
from grailnode.node.state_locks import is_locked, lock_state
from grailnode.node.telemetry import NodeTelemetry
from grailnode.node.user_errors import explain
from grailnode.run.joining import open_config
from protocol.quantization import quantize
from protocol.run import RunManifest
from roles.node.identity import Node
from roles.ports import EngineError
from roles.trainer.tensor_shards import TensorSource
from roles.trainer.training_spool import TrainingSpool
from roles.trainer.verified_batch import VerifiedGroup

_STOP_SECONDS: Final = 20.0
_AWAY_SECONDS: Final = 60.0  # longer than the pause before a process that failed is started again
_LAST_LINES: Final = 5
_MOST_WAITING: Final = 2  # versions for their upload
_DIGEST_BYTES: Final = 32

Result = TypeVar("Result")

Weights = Mapping[str, Tensor] | Path | str
"""Floating-point tensors by the names in the run's checkpoint, or a directory with a Hugging Face checkpoint."""


class TrainerEndedError(UserError):
    """The node that uploads and downloads has ended; the text has its last lines."""


@dataclass(frozen=True)
class Group:
    """The rollouts of one prompt, which enough validators accepted.

    Attributes:
        prompt: token ids; completions: token ids behind it of each rollout, with an environment's replies in an
            episode. A rollout may end before its last token, or its first one.
        drawn: which tokens of each completion the policy drew; a loss leaves out the others.
        logprobs: of each completion's tokens under the version that sampled them, at the run's temperature: float32
            [T], one for each token, as validators computed them; 0 where the policy did not draw.
        rewards: of each rollout, as validators computed them; of one that ends early, of their continuations.
        turn_rewards: of each turn of each rollout, 0 before the last one; a rollout without episodes is one turn.
        version: the policy version that sampled them; age: how many versions older it is than the newest.
        digest: names the group: 32 bytes.
    """

    prompt: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]
    drawn: tuple[tuple[bool, ...], ...]
    logprobs: tuple[np.ndarray, ...]
    rewards: tuple[float, ...]
    turn_rewards: tuple[tuple[float, ...], ...]
    version: int
    age: int
    digest: bytes


Groups = Group | Sequence[Group] | Sequence[bytes]
"""A group, or a list of groups or of their digests."""


class AsyncTrainer:
    """A trainer for a program in trio; `open_trainer_async` makes one. Its calls are those of `Trainer`.

    They leave the event loop to others while they wait, and may be cancelled. Then a version was published or was not,
    as `version` says.

    Attributes:
        run, policy: as of `Trainer`.
    """

    def __init__(self, node: Node, spool: TrainingSpool, config: Config, report: Report = report_to_stderr) -> None:
        self.run = node.run
        self._progress = partial(progress, report)
        self.policy = policy_directory(config)
        self._spool = spool
        model = models.build(Policy.load(self.policy), lora=self.run.lora)
        self._shapes = model.shapes if self.run.lora is None else published_adapters(model.shapes)
        # Only transformers' modules have other names than files.
        self._file_weights: Callable[[Any], Mapping[str, Tensor]] = getattr(model, "file_weights", dict)
        self._process: int | None = os.getpid()

    def close(self) -> None:
        """Refuse all later calls: another program may train with this state."""
        self._process = None

    @property
    def version(self) -> int:
        """The newest version that was published."""
        return self._spool.version

    async def publish(self, weights: Weights, *, step: int) -> int:
        """Publish the next version, as `Trainer.publish` does."""
        self._check(step=step)
        with self._progress(f"step {step}: checking weights") as say:
            try:
                published = await trio.to_thread.run_sync(self._published, weights)
                await self._spool.wait_for_uploads(_MOST_WAITING - 1, say)
                with trio.CancelScope(shield=True):  # a version is durable and counted, or neither
                    await self._spool.publish(_reported(TensorSource.of(published), step, say), step)
            except ValueError as error:
                raise UserError(f"{_source(weights)}: {error}") from error
        return self.version

    async def wait_for_uploads(self) -> None:
        """Return when every version that was published is in storage."""
        self._check()
        with self._progress("waiting for uploads") as say:
            await self._spool.wait_for_uploads(say=say)

    async def groups(self, min_count: int = 1, max_count: int | None = None) -> list[Group]:
        """Return verified groups, as `Trainer.groups` does."""
        self._check(min_count=min_count, max_count=min_count if max_count is None else max_count)
        if not 0 <= min_count <= (min_count if max_count is None else max_count):
            raise UserError(f"min_count {min_count} and max_count {max_count}: not 0 <= min_count <= max_count")
        with self._progress("waiting for groups") as say:
            return [self._group(group) for group in await self._spool.groups(min_count, max_count, say)]

    async def acknowledge(self, groups: Groups) -> None:
        """Say that groups were learned from, as `Trainer.acknowledge` does."""
        self._check()
        groups = [groups] if isinstance(groups, Group) else groups
        items = groups if isinstance(groups, Sequence) else [None]
        digests: list[Any] = [item.digest if isinstance(item, Group) else item for item in items]
        if not all(isinstance(digest, bytes) and len(digest) == _DIGEST_BYTES for digest in digests):
            raise UserError("acknowledge takes a group, or a list of groups or of their digests")
        await self._spool.acknowledge(digests)

    def _check(self, **counts: object) -> None:
        if self._process != os.getpid():
            raise UserError("this trainer was closed, or opened by another process; open it again")
        for name, count in counts.items():
            if not isinstance(count, int):
                raise UserError(f"{name} {count!r}: not a whole number")

    def _published(self, weights: Weights) -> dict[str, Tensor]:
        """Return weights as they are published, on the CPU, if they fit the run's policy."""
        source = _source(weights)
        if isinstance(weights, str | Path):
            read = load_weights if self.run.lora is None else read_adapters
            tensors: Mapping[str, Tensor] = read(Path(weights))
        elif isinstance(weights, Mapping):
            tensors = {name: weights[name] for name in published_names(self.policy, weights)}
        else:
            raise UserError(f"{source}: {_kind(weights)}; publish a state dict, or a checkpoint's directory")
        for name, tensor in tensors.items():
            if not isinstance(name, str):
                raise UserError(f"{source}: {name!r} is {_kind(name)}, not a tensor's name; publish a state dict")
            if fault := _fault(tensor):
                raise UserError(f"{source}: {name} {fault}")
        tensors = self._file_weights(tensors)
        try:
            models.check_fit(self._shapes, tensors)
        except EngineError as error:
            raise UserError(
                f"{source}: {error}; the names are those of the checkpoint's files, or of its model's state_dict()"
            ) from error
        rounded = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}
        if wrong := next((name for name, tensor in rounded.items() if not tensor.isfinite().all()), ""):
            raise UserError(f"{source}: {wrong} has a value that is not finite, or too large for BF16")
        return quantize(rounded, self.run.precision)

    def _group(self, group: VerifiedGroup) -> Group:
        completions, drawn = zip(*group.sequences, strict=True)
        return Group(
            prompt=group.prompt_tokens,
            completions=completions,
            drawn=drawn,
            logprobs=tuple(map(_aligned, group.completion_logprobs, drawn)),
            rewards=group.rewards,
            turn_rewards=tuple(group.turn_rewards),
            version=group.version,
            age=self.version - group.version,
            digest=group.digest,
        )


class Trainer:
    """A trainer of a run; `open_trainer` makes one. All calls block, and come from one thread at a time.

    Attributes:
        run: the rules that everybody has signed, such as `group_size` and `sampling`.
        policy: the directory with the checkpoint of version 0 (the base in a LoRA run) and its tokenizer.
        version: the newest version that was published.
    """

    def __init__(self, open_first: Callable[[], AsyncTrainer], ranks: "dist.ProcessGroup | None") -> None:
        self._ranks = ranks
        self._calling = Lock()

        def open_trainer() -> tuple[RunManifest, Path, int]:
            self._trainer = open_first()
            return self._trainer.run, self._trainer.policy, self._trainer.version

        self.run, self.policy, self.version = self._on_first(open_trainer)

    def publish(self, weights: Weights, *, step: int) -> int:
        """Publish the next version, and return its number; the upload goes on behind this call.

        Args:
            weights: floating-point tensors by the names in the run's checkpoint, or in the state dict of transformers'
                model, which fuses experts; or a directory with a Hugging Face checkpoint (of PEFT's adapters in a LoRA
                run). They are rounded to BF16. Of a DTensor, each rank gives its part.
            step: optimizer steps up to it.

        Raises:
            UserError: names, shapes or dtypes are not those of the run's policy, a value is not finite, or the node has
                ended.
        """
        if self._ranks is not None and isinstance(weights, Mapping):
            weights = self._gathered(weights)
        self.version = self._call(lambda trainer: trainer.publish(weights, step=step))
        return self.version

    def wait_for_uploads(self) -> None:
        """Return when every version that was published is in storage."""
        self._call(lambda trainer: trainer.wait_for_uploads())

    def groups(self, min_count: int = 1, max_count: int | None = None) -> list[Group]:
        """Return verified groups that were not given out before; this waits for at least `min_count`.

        There are at most `max_count`, or all that have come; the oldest come first.

        A group comes again after a restart of this program, until it is acknowledged. One that is too old for the run
        (`trainer.max_staleness`) does not come.
        """
        return self._call(lambda trainer: trainer.groups(min_count, max_count))

    def acknowledge(self, groups: Groups) -> None:
        """Say that groups were learned from, and never have to come again.

        Call it when your own checkpoint, with the digests of the groups that came since the one before, is durable. If
        you call it with these after a restart, too, no group comes twice.
        """
        self._call(lambda trainer: trainer.acknowledge(groups))

    def _call(self, call: Callable[[AsyncTrainer], Awaitable[Result]]) -> Result:
        if not self._calling.acquire(blocking=False):
            raise UserError("another thread is in a call of this trainer; take turns, or use open_trainer_async")
        try:
            return self._on_first(lambda: trio.run(call, self._trainer))
        finally:
            self._calling.release()

    def _on_first(self, function: Callable[[], Result]) -> Result:
        """Call a function on the first rank, and return its result, or raise its error, on all."""
        if self._ranks is None:
            return function()
        answers: list[Any] = [None]
        if dist.get_rank(self._ranks) == 0:
            try:
                answers[0] = function()
            except UserError as error:
                answers[0] = error
            except Exception as error:  # the other ranks would wait for the answer for as long as groups may take
                answers[0] = UserError(f"the first rank has failed: {explain(error) or repr(error)}")
                dist.broadcast_object_list(answers, group=self._ranks, group_src=0)
                raise
        dist.broadcast_object_list(answers, group=self._ranks, group_src=0)
        if isinstance(answers[0], UserError):
            raise answers[0]
        answer: Result = answers[0]
        return answer

    def _gathered(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return weights of which no tensor is divided among ranks; only the first rank gets those that were."""
        whole, failure = dict(weights), None
        for name, tensor in weights.items():
            if hasattr(tensor, "full_tensor"):  # a DTensor
                divided: Any = tensor.detach()
                full = (divided.to(torch.bfloat16) if tensor.is_floating_point() else divided).full_tensor()
                whole[name] = full.new_empty(0)
                if dist.get_rank(self._ranks) == 0 and failure is None:
                    try:
                        whole[name] = full.cpu()
                    except (RuntimeError, MemoryError) as error:  # the others wait until all tensors are gathered
                        failure = error

        def check() -> None:
            if failure is not None:
                raise failure

        self._on_first(check)
        return whole


@contextmanager
def open_trainer(
    run: str | Path,
    name: str = "trainer",
    *,
    ranks: "dist.ProcessGroup | None" = None,
    report: Report = report_to_stderr,
) -> Iterator[Trainer]:
    """Yield the trainer of a run, and run its node meanwhile.

    Args:
        run: the path of run.toml.
        name: of the node, whose key is in the run's keys/.
        ranks: the processes of this program, if it has several. All make the same calls and get the same answers; the
            first one has the node. Their group must wait for as long as groups may take.
        report: takes lines for people, at the latest every 30 s while a call takes long; by default they are printed on
            standard error.

    Raises:
        UserError: the run, the key or the policy cannot be used, or another program trains with this state.
    """
    with ExitStack() as stack:
        yield Trainer(lambda: stack.enter_context(_open(run, name, report)), ranks)


@asynccontextmanager
async def open_trainer_async(
    run: str | Path, name: str = "trainer", *, report: Report = report_to_stderr
) -> AsyncIterator[AsyncTrainer]:
    """Yield the trainer of a run to a program in trio, as `open_trainer` does."""
    opened = _open(run, name, report)
    trainer = await trio.to_thread.run_sync(opened.__enter__)
    try:
        yield trainer
    finally:
        with trio.CancelScope(shield=True):  # the node is stopped whatever happens
            await trio.to_thread.run_sync(opened.__exit__, None, None, None)


@contextmanager
def _open(run: str | Path, name: str, report: Report) -> Iterator[AsyncTrainer]:
    config = open_config(str(run), ("trainer.external=true",))
    if config.trainer.outer is not None:
        raise UserError("trainer.outer: the sites of a run have training loops of their own; drop this section")
    check_start(config, "trainer", name, report)
    state = state_directory(config, name)
    with ExitStack() as stack:
        stack.enter_context(lock_state(state, "training"))
        node = make_node(config, name, NodeTelemetry(name))
        log = config.at(config.node.logs) / f"{name}-external.log"
        check = _check_of_other(state)
        if not is_locked(state, "upload"):
            check = partial(_check_program, stack.enter_context(_program(run, name, log)), log)
        spool = TrainingSpool(node, config.trainer.max_staleness, config.trainer.file_bytes, check)
        with progress(report, "reading the state, or writing version 0"):
            trio.run(spool.begin, genesis_reader(config, node.run, policy_directory(config)))
        trainer = AsyncTrainer(node, spool, config, report)
        stack.callback(trainer.close)
        yield trainer


def _reported(source: TensorSource, step: int, say: Report) -> TensorSource:
    """Return a source that says how much of it was read."""
    total, done = sum(source.sizes.values()), 0

    def read(names: Sequence[str]) -> Mapping[str, Tensor]:
        nonlocal done
        say(f"step {step}: writing {done / 1e9:.1f} of {total / 1e9:.1f} GB")
        done += sum(source.sizes[name] for name in names)
        return source.read(names)

    return TensorSource(source.sizes, read)


def _fault(tensor: object) -> str:
    """Return why a value cannot be published as a weight; empty if it can."""
    if not isinstance(tensor, Tensor):
        return f"is {_kind(tensor)}; publish tensors of torch"
    if not tensor.is_floating_point():
        return f"has dtype {tensor.dtype}; publish floating-point ones"
    if hasattr(tensor, "full_tensor"):  # a DTensor
        return "is divided among ranks; open the trainer with `ranks`, or publish what its full_tensor() returns"
    if tensor.is_meta:
        return "has no values, being on the device meta; publish weights that were loaded"
    is_dense = tensor.layout == torch.strided and not tensor.is_nested
    return "" if is_dense else "is sparse or nested; publish a dense tensor"


def _kind(value: object) -> str:
    """Return the type of a value with its article."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _source(weights: Weights) -> str:
    return str(weights) if isinstance(weights, str | Path) else "weights"


def _aligned(logprobs: np.ndarray, drawn: Sequence[bool]) -> np.ndarray:
    """Return float32 [T] for all tokens of a completion: the log-probabilities of the drawn ones, and 0."""
    aligned = np.zeros(len(drawn), np.float32)
    aligned[np.array(drawn, bool)] = logprobs
    return aligned


@contextmanager
def _program(run: str | Path, name: str, log: Path) -> "Iterator[subprocess.Popen[bytes]]":
    options = ("--run", str(run), "--name", name, "--set", "trainer.external=true")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "grailnode", "--role", "trainer", *options], stdout=file, stderr=file
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _check_of_other(state: Path) -> Callable[[], None]:
    """Return a check of a node that somebody else has started, whose upload process may be away while it restarts."""
    last_sign = time.monotonic()

    def check() -> None:
        nonlocal last_sign
        if is_locked(state, "upload"):
            last_sign = time.monotonic()
        elif time.monotonic() - last_sign > _AWAY_SECONDS:
            raise TrainerEndedError(f"{state}: the trainer's node, which ran before, has ended; open the trainer again")

    return check


def _check_program(process: "subprocess.Popen[bytes]", log: Path) -> None:
    if process.poll() is not None:
        lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        raise TrainerEndedError(f"the trainer's node has ended ({log}): {' / '.join(lines)}")
