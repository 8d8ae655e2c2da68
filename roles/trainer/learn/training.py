"""The training process: groups in, snapshots out. The training loop never waits for storage or network.

The loop draws from the replay buffer and takes steps. Other tasks read the inbox and write checkpoints and snapshots.
If the writer is still busy when a version should be published, the loop goes on, and a later step is published instead.
A checkpoint is written before the snapshot of the same moment and contains the replay buffer, so a process that is
killed at any instruction comes back as it was.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio
from torch import Tensor

from protocol.digest import Weights, digest_weights
from protocol.errors import ChainError
from protocol.limits import MAX_SHARD_BYTES
from roles.node.identity import Node
from roles.ports import NotFoundError, StateError
from roles.trainer.learn.checkpoint_file import CheckpointFile
from roles.trainer.learn.learner import Checkpoint, Learner, StepReport
from roles.trainer.learn.replay_buffer import ReplayBuffer
from roles.trainer.spool import (
    INBOX,
    SnapshotName,
    next_version,
    put_snapshot,
)
from roles.trainer.verified_batch import VerifiedBatch, VerifiedGroup

CHECKPOINT = "training/checkpoint"


@dataclass(frozen=True)
class TrainingSettings:
    """What a trainer's operator sets.

    Attributes:
        groups_per_step: groups of one optimizer step; the loop waits until there are as many.
        steps_per_version: optimizer steps between two published versions.
        poll_seconds: how often to look into the inbox.
        training_steps: optimizer steps after which training ends; 0 for no end.
    """

    groups_per_step: int
    steps_per_version: int
    poll_seconds: float = 0.05
    training_steps: int = 0


@dataclass
class TimeShares:
    """Seconds that the training loop spent on steps, on waiting for groups, and on handing versions to the writer."""

    compute: float = 0.0
    data: float = 0.0
    hand_over: float = 0.0

    def shares(self) -> tuple[float, float]:
        """Return (data, hand_over) as shares of all three; zeros at the start."""
        total = self.compute + self.data + self.hand_over
        return (self.data / total, self.hand_over / total) if total else (0.0, 0.0)


@dataclass(frozen=True)
class _VersionFiles:
    """What the writer needs to make a version durable.

    Attributes:
        learner: weights and state; its copies may still be on their way from the device.
        replay: the state of the replay buffer.
        consumed_paths: the inbox objects whose groups are in `replay` or were used before.
    """

    name: SnapshotName
    learner: Checkpoint
    replay: dict[str, Tensor]
    consumed_paths: tuple[str, ...]

    def checkpoint(self) -> bytes:
        """Wait for the copies, and return the checkpoint as a safetensors file."""
        return CheckpointFile(self.name.version, self.learner.state(), self.replay).encode()


class Training:
    """The training loop of one trainer.

    Args:
        genesis: reads the weights of version 0; called only if there is no checkpoint.
    """

    def __init__(
        self,
        node: Node,
        learner: Learner,
        buffer: ReplayBuffer,
        genesis: Callable[[], Weights],
        settings: TrainingSettings,
    ) -> None:
        self._node = node
        self._learner = learner
        self._buffer = buffer
        self._genesis = genesis
        self._settings = settings
        self._version = -1
        self._version_is_due = False
        self._handed_steps = 0  # the optimizer steps of the version that the writer got last
        self._new_groups = trio.Event()
        self._consumed_paths: list[str] = []  # since the last version
        self._read_paths: set[str] = set()  # inbox objects that were read and not deleted yet
        self._time = TimeShares()

    async def run(self) -> None:
        """Train until the last step; then hand over the last version and keep the inbox empty, for ever.

        Raises:
            StateError, ValueError: this node's own state is damaged, or is another model's.
        """
        await self._restore()
        outgoing, incoming = trio.open_memory_channel[_VersionFiles](0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read_inbox)
            nursery.start_soon(self._write, incoming)
            while not 0 < self._settings.training_steps <= self._learner.steps:
                await self._wait_for_groups()
                if not await self._step():
                    continue
                began = trio.current_time()
                self._hand_over(outgoing)
                self._time.hand_over += trio.current_time() - began
            await self._end(outgoing)

    async def _end(self, outgoing: "trio.MemorySendChannel[_VersionFiles]") -> None:
        """Hand over the policy of the last step, then delete what still comes in: nothing will learn from it."""
        while self._handed_steps < self._learner.steps:
            self._version_is_due = True
            self._hand_over(outgoing)
            await trio.sleep(self._settings.poll_seconds)
        self._node.telemetry.event("training-ended", step=self._learner.steps, version=self._version)
        while True:
            paths, self._consumed_paths = self._consumed_paths, []
            for path in paths:
                await self._node.state.delete(path)
            await trio.sleep(self._settings.poll_seconds)

    async def _wait_for_groups(self) -> None:
        began = trio.current_time()
        while len(self._buffer) < self._settings.groups_per_step:
            self._new_groups = trio.Event()
            await self._new_groups.wait()
        self._time.data += trio.current_time() - began

    async def _step(self) -> bool:
        """Take one optimizer step; return whether it was taken."""
        began = trio.current_time()
        groups = self._buffer.draw(self._settings.groups_per_step)
        try:
            report: StepReport = await self._node.run_sync(self._learner.step, groups)
        except ValueError as error:  # a gradient is not finite: nothing has changed, and these groups are used up
            self._node.telemetry.event("step-refused", error=str(error), groups=len(groups))
            return False
        self._time.compute += trio.current_time() - began
        data, hand_over = self._time.shares()
        self._node.telemetry.event(
            "step",
            step=report.step,
            loss=report.loss,
            grad_norm=report.grad_norm,
            reward=report.mean_reward,
            entropy=report.entropy,
            clipped=report.clip_fraction,
            divergence=report.divergence,
            overlong=report.overlong,
            learning_rate=report.learning_rate,
            length=mean_tokens(groups),
            staleness=mean_staleness(groups, self._version),
            buffered=len(self._buffer),
            data_wait_fraction=data,
            io_wait_fraction=hand_over,
            groups=",".join(group.digest.hex()[:16] for group in groups),
        )
        return True

    def _hand_over(self, outgoing: "trio.MemorySendChannel[_VersionFiles]") -> None:
        """Give the writer a version if one is due and the writer is free; never wait for it."""
        self._version_is_due = self._version_is_due or self._learner.steps % self._settings.steps_per_version == 0
        if not self._version_is_due or not outgoing.statistics().tasks_waiting_receive:
            return
        name = SnapshotName(self._version + 1, self._learner.steps)
        self._buffer.advance(name.version)
        checkpoint = self._learner.begin_checkpoint()
        outgoing.send_nowait(_VersionFiles(name, checkpoint, self._buffer.state(), tuple(self._consumed_paths)))
        self._version, self._version_is_due, self._consumed_paths = name.version, False, []
        self._handed_steps = name.optimizer_step

    async def _write(self, incoming: "trio.MemoryReceiveChannel[_VersionFiles]") -> None:
        """Make each version durable: its checkpoint, then its snapshot; then delete what the checkpoint contains from
        the inbox.
        """
        node = self._node
        async for files in incoming:
            await node.state.put(CHECKPOINT, await node.run_sync(files.checkpoint))
            await put_snapshot(node.state, files.name, await node.run_sync(files.learner.bf16_view))
            for path in files.consumed_paths:
                await node.state.delete(path)

    async def _read_inbox(self) -> None:
        """Add what the collector delivers to the replay buffer."""
        while True:
            inbox_paths = {item.path async for item in self._node.state.list(INBOX)}
            self._read_paths &= inbox_paths  # forget what the writer has deleted
            for path in sorted(inbox_paths - self._read_paths):
                await self._read_batch(path)
            await trio.sleep(self._settings.poll_seconds)

    async def _read_batch(self, path: str) -> None:
        batch = VerifiedBatch.from_bytes(await self._node.state.get(path, VerifiedBatch.max_bytes))
        for group in batch.groups:
            self._buffer.add(group)
        self._read_paths.add(path)
        self._consumed_paths.append(path)
        self._new_groups.set()

    def _checked_genesis(self) -> Weights:
        """Return the weights of version 0.

        Raises:
            ChainError: they are not those that the run names.
        """
        weights = self._genesis()
        if digest_weights(weights) != self._node.run.model.genesis:
            raise ChainError(
                "this policy is not the genesis that the run names; use the one it was founded with", "policy"
            )
        return weights

    async def _restore(self) -> None:
        """Go on from the checkpoint, or from genesis if there is none.

        Raises:
            StateError: the checkpoint is missing, older than a version that was made after it, or another model's.
        """
        node = self._node
        newest = await next_version(node.state) - 1
        try:
            data = await node.state.get(CHECKPOINT, MAX_SHARD_BYTES)
        except NotFoundError:
            if newest > 0:
                raise _unusable(f"missing, but version {newest} was made from it") from None
            if newest < 0:
                await put_snapshot(node.state, SnapshotName(0, 0), self._checked_genesis())
            self._version = 0
            self._buffer.advance(self._version)
            return
        checkpoint = CheckpointFile.decode(data)
        if checkpoint.version < newest:
            raise _unusable(f"of version {checkpoint.version}, but version {newest} was made after it")
        try:
            self._learner.restore(checkpoint.learner)
        except ValueError as error:
            raise _unusable(str(error)) from error
        if checkpoint.replay:
            self._buffer.restore(checkpoint.replay)
        if newest < checkpoint.version:
            # killed between the checkpoint and its snapshot: the restored masters give the very same view
            await put_snapshot(
                node.state, SnapshotName(checkpoint.version, self._learner.steps), self._learner.bf16_view()
            )
        self._handed_steps = self._learner.steps
        self._version = checkpoint.version
        self._buffer.advance(self._version)
        node.telemetry.event("resumed", version=self._version, step=self._learner.steps, groups=len(self._buffer))


def mean_tokens(groups: Sequence[VerifiedGroup]) -> float:
    """Return the mean length of the completions of some groups."""
    return statistics.fmean(len(tokens) // 4 for group in groups for tokens in group.completions)


def mean_staleness(groups: Sequence[VerifiedGroup], version: int) -> float:
    """Return by how many versions some groups are behind a version, on average."""
    return statistics.fmean(version - group.version for group in groups)


def _unusable(what: str) -> StateError:
    return StateError(f"{CHECKPOINT} of this node's state", what)
