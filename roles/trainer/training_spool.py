"""What a training loop takes from its node, and hands to it: verified groups come out, versions go in.

`TrainingSpool` stands between the collector, which fills the inbox, and the publisher, which empties the outbox
(spool.py). Our own loop (learn/training.py) and those of other programs (grailnode/library) use it alike.

Invariants:
1. A version whose `publish` has returned is durable. The publisher uploads it, whatever becomes of this process.
2. A group is given out once by a process, and again after a restart, until it is acknowledged. Then it is never given
   out again: acknowledged groups are remembered until they would be too stale, because a collector that was killed may
   deliver a batch twice.
3. A batch is deleted from the inbox after all its groups are acknowledged or too stale, and the note of that is
   durable.

So a loop learns from every group once if its own checkpoint has the digests that were not acknowledged when it was
written, and it acknowledges these after a restart.

The worst inputs: a loop that is killed at any instruction (what it had not acknowledged comes again), and one that
publishes faster than storage takes versions (`wait_for_uploads`).
"""

from collections.abc import Callable, Iterable
from typing import Annotated, ClassVar, Final

import trio
from pydantic import Field

from protocol.digest import Weights
from protocol.encoding import Record, Version
from protocol.identity.signing import Digest
from roles.node.identity import Node
from roles.ports import NotFoundError
from roles.trainer.spool import (
    ACKNOWLEDGED,
    Inbox,
    SnapshotName,
    checked_genesis,
    delete_unnamed_weights,
    is_too_stale,
    list_snapshots,
    next_version,
    put_snapshot,
)
from roles.trainer.tensor_shards import SHARD_BYTES, TensorSource, VersionSource
from roles.trainer.verified_batch import VerifiedGroup

_POLL_SECONDS: Final = 0.05  # between two looks into inbox or outbox
_MAX_GROUPS: Final = 1 << 20
_MAX_STEP: Final = 1 << 53  # of a manifest


class AcknowledgedGroups(Record):
    """The groups that the loop has learned from, each with its version, or a newer one."""

    kind: ClassVar[str] = "acknowledged-groups"
    max_bytes: ClassVar[int] = 64 * _MAX_GROUPS
    max_items: ClassVar[int] = 4 * _MAX_GROUPS
    groups: Annotated[tuple[tuple[Digest, Version], ...], Field(max_length=_MAX_GROUPS)]


class TrainingSpool:
    """The groups and versions of one training loop; its tasks may share it. `check` is called at each look into inbox
    or outbox; it raises if it is in vain to wait. Files of a version have `shard_bytes`.
    """

    def __init__(
        self, node: Node, max_staleness: int, shard_bytes: int = SHARD_BYTES, check: Callable[[], None] = lambda: None
    ) -> None:
        self._node = node
        self._max_staleness = max_staleness
        self._shard_bytes = shard_bytes
        self._check = check
        # versions of groups by digest: of those that were given out or acknowledged, and of the latter
        self._given: dict[bytes, int] = {}
        self._acknowledged: dict[bytes, int] = {}
        self._waiting: list[VerifiedGroup] = []  # that were read and not given out
        self._inbox = Inbox(node.state)
        self._acknowledging = trio.Lock()
        self.version = -1
        """The newest version that was published."""

    async def begin(self, genesis: Callable[[], Weights]) -> None:
        """Go on from this node's state, or publish version 0, whose weights `genesis` reads before they are quantized;
        delete what a crash left of later versions. ChainError if they are not those that the run names.
        """
        node = self._node
        self.version = await next_version(node.state) - 1
        await delete_unnamed_weights(node.state, self.version)
        if self.version < 0:
            weights = dict(await node.run_sync(checked_genesis, node.run, genesis))
            await self.publish(TensorSource.of(weights), 0)
            await node.run_sync(weights.clear)  # on the event loop, giving back the memory takes long
        try:
            data = await node.state.get(ACKNOWLEDGED, AcknowledgedGroups.max_bytes)
        except NotFoundError:
            return
        self._acknowledged = dict(AcknowledgedGroups.from_bytes(data).groups)
        self._given = dict(self._acknowledged)

    async def publish(self, source: VersionSource, step: int) -> int:
        """Make the next version durable after so many optimizer steps, and return its number; ValueError if the step is
        no step. If this is cancelled, the version may be durable, and `version` says so from the next snapshot on.
        """
        if not 0 <= step < _MAX_STEP:
            raise ValueError(f"step {step}: not from 0 to {_MAX_STEP - 1}")
        durable = await next_version(self._node.state) - 1  # newer where an interruption kept it from being counted
        name = SnapshotName(max(self.version, durable) + 1, step)
        await put_snapshot(self._node.state, name, source, self._node.run_sync, self._shard_bytes)
        self.version = name.version
        self._given, self._acknowledged = self._recent(self._given), self._recent(self._acknowledged)
        return name.version

    async def wait_for_uploads(self, remaining: int = 0, say: Callable[[str], None] = lambda text: None) -> None:
        """Return when no more than so many versions wait for their upload; `say` hears at each look how many do."""
        while (count := len(await list_snapshots(self._node.state))) > remaining:
            say(f"waiting for the upload of {count} versions")
            self._check()
            await trio.sleep(_POLL_SECONDS)

    async def groups(
        self, min_count: int = 1, max_count: int | None = None, say: Callable[[str], None] = lambda text: None
    ) -> list[VerifiedGroup]:
        """Return verified groups that were not given out before, of which this waits for at least `min_count`: at most
        `max_count`, or all that have come. `say` hears at each look how many have.
        """
        while True:
            new_groups = await self._inbox.read()
            groups = {group.digest: group for group in self._waiting + new_groups if group.digest not in self._given}
            self._waiting = [group for group in groups.values() if self._is_needed(group.digest, group.version)]
            await self._inbox.keep(self._is_needed)
            if len(self._waiting) >= min_count:
                break
            say(f"waiting for groups: {len(self._waiting)} of {min_count}")
            self._check()
            await trio.sleep(_POLL_SECONDS)
        count = len(self._waiting) if max_count is None else max_count
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        self._given |= {group.digest: group.version for group in batch}
        return batch

    async def acknowledge(self, digests: Iterable[bytes]) -> None:
        """Remember durably from which groups the loop has learned, and delete batches without others. After a restart
        these may be groups that were given out before it.
        """
        if versions := {digest: self._given.get(digest, self.version) for digest in digests}:
            async with self._acknowledging:
                acknowledged = self._recent({**self._acknowledged, **versions})
                record = AcknowledgedGroups(groups=tuple(sorted(acknowledged.items())))
                await self._node.state.put(ACKNOWLEDGED, record.to_bytes())
                self._acknowledged = acknowledged
                self._given |= versions
            await self._inbox.keep(self._is_needed)

    def _recent(self, versions: dict[bytes, int]) -> dict[bytes, int]:
        return {digest: version for digest, version in versions.items() if not self._is_too_stale(version)}

    def _is_needed(self, digest: bytes, version: int) -> bool:
        return digest not in self._acknowledged and not self._is_too_stale(version)

    def _is_too_stale(self, version: int) -> bool:
        return is_too_stale(version, self.version, self._max_staleness)
