"""The training process: groups in, snapshots out, and never a wait for storage or network in between.

The loop draws from the replay buffer and steps. Reading the inbox and writing checkpoints and snapshots are tasks
beside it; if the writer is still busy when a version is due, the loop goes on and publishes after a later step. A
checkpoint is written before the snapshot of the same moment, and holds the replay buffer too, so a process killed
anywhere comes back as it was.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

import safetensors.torch
import torch
import trio
from torch import Tensor

from protocol.digest import Weights, digest_weights
from protocol.errors import ChainError
from protocol.judging.verdict import unpack_logprobs
from protocol.limits import MAX_SHARD_BYTES
from protocol.rollout.batch import unpack_tokens
from roles.node.identity import Node
from roles.ports import NotFoundError
from roles.trainer.learn.learner import Checkpoint, Learner, StepReport
from roles.trainer.learn.replay_buffer import ReplayBuffer, TrainingGroup
from roles.trainer.spool import INBOX, SnapshotName, last_published, next_version, put_snapshot, snapshots
from roles.trainer.verified_batch import VerifiedBatch

CHECKPOINT = "training/checkpoint"
_META = "meta"
_LEARNER = "learner/"
_REPLAY = "replay/"


@dataclass(frozen=True)
class TrainingSettings:
    """What a trainer's operator decides.

    Attributes:
        groups_per_step: groups of one optimizer step; the loop waits until there are as many.
        steps_per_version: optimizer steps between two published versions.
        poll_seconds: how often to look into the inbox.
    """

    groups_per_step: int
    steps_per_version: int
    poll_seconds: float = 0.05


@dataclass
class TimeShares:
    """Where the training loop's seconds went: computing, waiting for groups, handing snapshots over."""

    compute: float = 0.0
    data: float = 0.0
    hand_over: float = 0.0

    def shares(self) -> tuple[float, float]:
        """(data, hand over) as shares of all three."""
        total = self.compute + self.data + self.hand_over
        return (self.data / total, self.hand_over / total) if total else (0.0, 0.0)


@dataclass(frozen=True)
class _HandOver:
    """All that is written for a version: weights and state of its moment, the replay buffer, and the inbox objects in
    it.

    Attributes:
        learner: its copies may still be on their way from the device.
    """

    name: SnapshotName
    learner: Checkpoint
    replay: dict[str, Tensor]
    consumed: tuple[str, ...]

    def checkpoint(self) -> bytes:
        """The checkpoint as a safetensors file; waits for the copies."""
        meta = bytearray(json.dumps({"version": self.name.version}).encode())
        return safetensors.torch.save(
            {_LEARNER + key: tensor for key, tensor in self.learner.state().items()}
            | {_REPLAY + key: tensor for key, tensor in self.replay.items()}
            | {_META: torch.frombuffer(meta, dtype=torch.uint8)}
        )


class Training:
    """The training loop of one trainer.

    Args:
        genesis: reads the weights of version 0; called only when there is no checkpoint.
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
        self._due = False
        self._arrived = trio.Event()
        self._consumed: list[str] = []
        self._read: set[str] = set()
        self._waits = TimeShares()

    async def run(self) -> None:
        """Train for ever.

        Raises:
            StoreError, ValueError: this node's own state cannot be read or written, or is not this model's.
        """
        await self._restore()
        outgoing, incoming = trio.open_memory_channel[_HandOver](0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._feed)
            nursery.start_soon(self._write, incoming)
            while True:
                await self._wait_for_groups()
                if not await self._step():
                    continue
                began = trio.current_time()
                self._hand_over(outgoing)
                self._waits.hand_over += trio.current_time() - began

    async def _wait_for_groups(self) -> None:
        began = trio.current_time()
        while len(self._buffer) < self._settings.groups_per_step:
            self._arrived = trio.Event()
            await self._arrived.wait()
        self._waits.data += trio.current_time() - began

    async def _step(self) -> bool:
        """One optimizer step; whether it was taken."""
        began = trio.current_time()
        groups = self._buffer.draw(self._settings.groups_per_step)
        try:
            report: StepReport = await self._node.run_sync(self._learner.step, groups)
        except ValueError as error:  # a gradient that is no number: nothing has changed, and these groups are spent
            self._node.telemetry.event("step-refused", error=str(error), groups=len(groups))
            return False
        self._waits.compute += trio.current_time() - began
        data, hand_over = self._waits.shares()
        self._node.telemetry.event(
            "step",
            step=report.step,
            loss=report.loss,
            grad_norm=report.grad_norm,
            reward=report.mean_reward,
            entropy=report.entropy,
            clipped=report.clip_fraction,
            buffered=len(self._buffer),
            data_wait_fraction=data,
            io_wait_fraction=hand_over,
            groups=",".join(group.digest.hex()[:16] for group in groups),
        )
        return True

    def _hand_over(self, outgoing: "trio.MemorySendChannel[_HandOver]") -> None:
        """Give the writer a version if one is due and it is free; never wait for it."""
        self._due = self._due or self._learner.steps % self._settings.steps_per_version == 0
        if not self._due or not outgoing.statistics().tasks_waiting_receive:
            return
        name = SnapshotName(self._version + 1, self._learner.steps)
        self._buffer.advance(name.version)
        moment = self._learner.begin_checkpoint()
        outgoing.send_nowait(_HandOver(name, moment, self._buffer.state(), tuple(self._consumed)))
        self._version, self._due, self._consumed = name.version, False, []

    async def _write(self, incoming: "trio.MemoryReceiveChannel[_HandOver]") -> None:
        """Make each version durable: checkpoint, snapshot, then drop what the checkpoint contains from the inbox."""
        node = self._node
        async for item in incoming:
            await node.state.put(CHECKPOINT, await node.run_sync(item.checkpoint))
            await put_snapshot(node.state, item.name, await node.run_sync(item.learner.bf16_view))
            for path in item.consumed:
                await node.state.delete(path)

    async def _feed(self) -> None:
        """Bring what the collector delivers into the buffer."""
        while True:
            listed = {item.path async for item in self._node.state.list(INBOX)}
            self._read &= listed  # the writer deletes what it has made durable; a listing may still show it
            for path in sorted(listed - self._read):
                await self._take(path)
            await trio.sleep(self._settings.poll_seconds)

    async def _take(self, path: str) -> None:
        harvest = VerifiedBatch.from_bytes(await self._node.state.get(path, VerifiedBatch.max_bytes))
        for group in training_groups(harvest):
            self._buffer.add(group)
        self._read.add(path)
        self._consumed.append(path)
        self._arrived.set()

    def _checked_genesis(self) -> Weights:
        """The weights of version 0.

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
        """Go on from the checkpoint; from genesis where there is none."""
        node = self._node
        try:
            data = await node.state.get(CHECKPOINT, MAX_SHARD_BYTES)
        except NotFoundError:
            if await next_version(node.state) == 0:
                await put_snapshot(node.state, SnapshotName(0, 0), self._checked_genesis())
            self._version = await next_version(node.state) - 1
            self._buffer.advance(self._version)
            return
        state = safetensors.torch.load(data)
        version = int(json.loads(bytes(state.pop(_META).numpy()))["version"])
        self._learner.restore({k.removeprefix(_LEARNER): v for k, v in state.items() if k.startswith(_LEARNER)})
        self._buffer.restore({k.removeprefix(_REPLAY): v for k, v in state.items() if k.startswith(_REPLAY)})
        waiting = [name.version for name in await snapshots(node.state)]
        if version not in waiting and await last_published(node.state) < version:
            # killed between the checkpoint and its snapshot: the masters of that moment give the very same view
            await put_snapshot(node.state, SnapshotName(version, self._learner.steps), self._learner.bf16_view())
        self._version = await next_version(node.state) - 1
        self._buffer.advance(max(version, self._version))
        node.telemetry.event("resumed", version=self._version, step=self._learner.steps, groups=len(self._buffer))


def training_groups(harvest: VerifiedBatch) -> list[TrainingGroup]:
    """A harvest's groups as the learner takes them."""
    groups = []
    for group in harvest.groups:
        completions = tuple(unpack_tokens(completion) for completion in group.completions)
        logprobs = unpack_logprobs(group.logprobs, map(len, completions))
        groups.append(
            TrainingGroup(
                digest=group.digest,
                miner=harvest.miner,
                window=harvest.window,
                version=harvest.version,
                prompt=unpack_tokens(group.prompt),
                completions=completions,
                logprobs=tuple(torch.from_numpy(row.copy()) for row in logprobs),
                rewards=group.rewards,
            )
        )
    return groups
