"""The training process: groups in, snapshots and checkpoints out.

The loop takes groups into the replay buffer, draws from it, computes gradients and updates the masters. Another task
writes snapshots and checkpoints from the masters themselves, so that there is no copy of them, while the next gradients
are computed; an update waits until the version before it is written.

Groups and versions pass through the same spool as those of other programs' loops (training_spool.py). A checkpoint is
written before the snapshot of the same moment, contains the replay buffer, and is followed by the acknowledgement of
the groups that came before it. A process that is killed at any instruction goes on from its last checkpoint: with every
group that the checkpoint has not seen, and none that it has. With a checkpoint for each version it comes back as it
was. Otherwise versions may have been published after the checkpoint: the next version is then the first one after
these, and its patch leads from what is published to what training has now.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean

import trio

from protocol.digest import Weights
from roles.node.identity import Node
from roles.ports import StateError
from roles.trainer.learn.checkpoint_files import (
    NOTES,
    CheckpointNote,
    delete_checkpoints,
    get_replay,
    newest_checkpoint,
    put_checkpoint,
)
from roles.trainer.learn.learner import Learner, StepReport
from roles.trainer.learn.replay_buffer import ReplayBuffer
from roles.trainer.learn.training_settings import LARGE_MODEL, TrainingSettings
from roles.trainer.training_spool import TrainingSpool
from roles.trainer.verified_batch import VerifiedGroup


@dataclass(eq=False)
class Training:
    """The training loop of one trainer. `genesis` reads the weights of version 0, before they are quantized, if there
    is no checkpoint.
    """

    node: Node
    learner: Learner
    buffer: ReplayBuffer
    genesis: Callable[[], Weights]
    settings: TrainingSettings

    def __post_init__(self) -> None:
        self._version = -1  # the newest one, which may not be written yet
        self._masters_written = trio.Event()  # for the newest version
        self._masters_written.set()
        self._checkpoint_version = -1
        self._checkpoint_time = 0.0
        self._spool = TrainingSpool(self.node, self.buffer.max_staleness, self.settings.file_bytes)
        self._unacknowledged: set[bytes] = set()  # digests of groups that the spool has given out
        self._seconds: defaultdict[str, float] = defaultdict(float)  # of steps, of waiting for groups and the writer

    async def run(self) -> None:
        """Train until the last step; then keep the inbox empty for ever: nothing will learn from what comes in."""
        await self._restore()
        self._checkpoint_time = trio.current_time()
        async with trio.open_nursery() as nursery:
            while not self._is_over:
                if await self._step(await self._draw()) and (
                    self._is_over or self.learner.steps % self.settings.steps_per_version == 0
                ):
                    self._begin_version(nursery)
        self.node.telemetry.event("training-ended", step=self.learner.steps, version=self._version)
        while True:
            await self._spool.acknowledge([group.digest for group in await self._spool.groups()])

    @property
    def _is_over(self) -> bool:
        return 0 < self.settings.training_steps <= self.learner.steps

    async def _draw(self) -> list[VerifiedGroup]:
        """Return the groups of the next step, when as many have come."""
        began, count = trio.current_time(), self.settings.groups_per_step
        new_groups = await self._spool.groups(0)
        while True:
            for group in new_groups:
                self.buffer.add(group)
                self._unacknowledged.add(group.digest)
            if len(self.buffer) >= count:
                break
            new_groups = await self._spool.groups()
        self._seconds["data"] += trio.current_time() - began
        return self.buffer.draw(count)

    async def _step(self, groups: Sequence[VerifiedGroup]) -> bool:
        """Take one optimizer step; return whether it was taken."""
        began = trio.current_time()
        try:
            gradients = await self.node.run_sync(self.learner.gradients, groups)
            self._seconds["compute"] += trio.current_time() - began
            began = trio.current_time()
            await self._masters_written.wait()
            self._seconds["hand_over"] += trio.current_time() - began
            began = trio.current_time()
            report: StepReport = await self.node.run_sync(self.learner.update, gradients)
        except ValueError as error:  # a gradient is not finite: nothing has changed, and these groups are used up
            self.node.telemetry.event("step-refused", error=str(error), groups=len(groups))
            return False
        self._seconds["compute"] += trio.current_time() - began
        seconds = sum(self._seconds.values()) or 1.0
        self.node.telemetry.event(
            "step",
            **asdict(report),
            length=fmean(len(tokens) // 4 for group in groups for tokens in group.completions),
            staleness=fmean(self._version - group.version for group in groups),
            buffered=len(self.buffer),
            data_wait_fraction=self._seconds["data"] / seconds,
            io_wait_fraction=self._seconds["hand_over"] / seconds,
            groups=",".join(group.digest.hex()[:16] for group in groups),
        )
        return True

    def _begin_version(self, nursery: trio.Nursery) -> None:
        """Begin to write the policy of this moment as a version, with a checkpoint if one is due."""
        self._version += 1
        self.buffer.advance(self._version)
        replay: Callable[[], bytes] | None = None
        digests = frozenset[bytes]()
        if self._checkpoint_is_due():
            digests = frozenset(self._unacknowledged)
            replay = self.buffer.freeze(digests)
            self._checkpoint_version, self._checkpoint_time = self._version, trio.current_time()
        self._masters_written = trio.Event()
        nursery.start_soon(self._write, replay, digests)

    def _checkpoint_is_due(self) -> bool:
        settings = self.settings
        interval = settings.checkpoint_versions or (1 if self.learner.parameters < LARGE_MODEL else 20)
        seconds = trio.current_time() - self._checkpoint_time
        return (
            self._checkpoint_version < 0
            or self._version - self._checkpoint_version >= interval
            or 0 < settings.checkpoint_seconds <= seconds
            or self._is_over
        )

    async def _write(self, replay: Callable[[], bytes] | None, digests: frozenset[bytes]) -> None:
        """Make a version durable: its checkpoint if one is due, with what `replay` returns, then its snapshot; then
        acknowledge the groups of the checkpoint.
        """
        node, step = self.node, self.learner.steps
        if replay is not None:
            save = partial(self.learner.save, node.state, node.run_sync, self.settings.file_bytes)
            await put_checkpoint(node.state, (self._version, step), save, await node.run_sync(replay))
        await self._spool.publish(self.learner, step)
        self._masters_written.set()
        await self._spool.acknowledge(digests)
        self._unacknowledged -= digests

    async def _restore(self) -> None:
        """Go on from the newest checkpoint, or from genesis if there is none, and delete what a crash left over."""
        await self._spool.begin(self.genesis)
        note = await newest_checkpoint(self.node.state)
        await delete_checkpoints(self.node.state, note)
        if note is not None:
            await self._load(note)
        elif self._spool.version > 0:
            raise StateError(
                f"{NOTES} of this node's state", f"missing, but version {self._spool.version} was made from it"
            )
        self._version = self._spool.version

    async def _load(self, note: CheckpointNote) -> None:
        """Restore learner and replay buffer from a checkpoint."""
        node, spool = self.node, self._spool
        if note.version > spool.version + 1:
            raise StateError(f"{note.path} of this node's state", f"after version {spool.version}: some are missing")
        try:
            await self.learner.load(node.state, note.rows, node.run_sync)
            if replay := await get_replay(node.state, note):
                await spool.acknowledge(await node.run_sync(self.buffer.restore, replay))
        except ValueError as error:
            raise StateError(f"{note.folder} of this node's state", str(error)) from error
        if note.version > spool.version:
            # killed between the checkpoint and its snapshot: the restored masters give the very same view
            await spool.publish(self.learner, note.step)
        self._checkpoint_version = note.version
        self.buffer.advance(spool.version)
        node.telemetry.event(
            "resumed",
            version=spool.version,
            step=note.step,
            groups=len(self.buffer),
            behind=spool.version - note.version,
        )
