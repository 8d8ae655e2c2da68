"""The border of a trainer for a training loop that is not ours: versions go in, verified groups come out.

`ExternalTraining` takes the place of the training process (learn/training.py) between the collector, which fills the
inbox, and the publisher, which empties the outbox (spool.py).

Invariants:
1. A version whose `publish` has returned is durable. The publisher uploads it, whatever becomes of this process.
2. A group is given out once by a process, and again after a restart, until it is acknowledged. Then it is never given
   out again: acknowledged groups are remembered until they would be too stale, because a collector that was killed may
   deliver a batch twice.
3. A batch is deleted from the inbox after all its groups are acknowledged or too stale, and the note of that is
   durable.

The worst inputs: a caller that is killed at any instruction (what it had not acknowledged comes again), and one that
publishes faster than storage takes versions (it waits).
"""

from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, Final

import trio
from pydantic import Field

from protocol.digest import Weights
from protocol.encoding import Record, Version
from protocol.identity.signing import Digest
from protocol.quantization import quantize
from roles.node.identity import Node
from roles.ports import NotFoundError
from roles.trainer.spool import (
    ACKNOWLEDGED,
    Inbox,
    SnapshotName,
    begin_versions,
    is_too_stale,
    list_snapshots,
    put_snapshot,
)
from roles.trainer.tensor_shards import TensorSource
from roles.trainer.verified_batch import VerifiedGroup

_MOST_WAITING: Final = 2  # versions in the outbox
_POLL_SECONDS: Final = 0.2
_MAX_GROUPS: Final = 1 << 20
_MAX_STEP: Final = 1 << 53  # of a manifest


class AcknowledgedGroups(Record):
    """The groups that the caller has learned from, each with its version."""

    kind: ClassVar[str] = "acknowledged-groups"
    max_bytes: ClassVar[int] = 64 * _MAX_GROUPS
    max_items: ClassVar[int] = 4 * _MAX_GROUPS
    groups: Annotated[tuple[tuple[Digest, Version], ...], Field(max_length=_MAX_GROUPS)]


class ExternalTraining:
    """What the training loop of somebody else hands over and takes. `check` is called at each look into inbox or
    outbox; it raises if it is in vain to wait.
    """

    def __init__(self, node: Node, max_staleness: int, check: Callable[[], None] = lambda: None) -> None:
        self._node = node
        self._max_staleness = max_staleness
        self._check = check
        self._given: set[bytes] = set()  # digests of the groups that this process has given out
        self._acknowledged: dict[bytes, int] = {}  # their versions, by digest
        self._waiting: list[VerifiedGroup] = []  # that were read and not given out
        self._inbox = Inbox(node.state)
        self._acknowledging = trio.Lock()
        self.version = -1
        """The newest version that was published."""

    async def begin(self, genesis: Callable[[], Weights]) -> None:
        """Go on from this node's state, or publish version 0, whose weights `genesis` reads before they are quantized.
        ChainError if they are not those that the run names.
        """
        self.version = await begin_versions(self._node, genesis)
        try:
            data = await self._node.state.get(ACKNOWLEDGED, AcknowledgedGroups.max_bytes)
        except NotFoundError:
            return
        self._acknowledged = dict(AcknowledgedGroups.from_bytes(data).groups)

    async def publish(self, weights: Weights, step: int) -> int:
        """Make the next version durable after so many optimizer steps, and return its number. This waits while earlier
        ones wait for their upload. The weights are contiguous BF16 tensors on the CPU, with names and shapes of the
        run's checkpoint; ValueError if one is not finite, which no rollout can be proved with, or the step is no step.
        """
        node = self._node
        if not 0 <= step < _MAX_STEP:
            raise ValueError(f"step {step}: not from 0 to {_MAX_STEP - 1}")
        if wrong := await node.run_sync(_not_finite, weights):
            raise ValueError(f"{wrong}: a weight that is not finite, or too large for BF16")
        while len(await list_snapshots(node.state)) >= _MOST_WAITING:
            self._check()
            await trio.sleep(_POLL_SECONDS)
        published = await node.run_sync(quantize, weights, node.run.precision)
        name = SnapshotName(self.version + 1, step)
        with trio.CancelScope(shield=True):  # a version is durable and counted, or neither
            await put_snapshot(node.state, name, TensorSource.of(published), node.run_sync)
            self.version = name.version
        return name.version

    async def wait_for_uploads(self) -> None:
        """Return when every version is in storage."""
        while await list_snapshots(self._node.state):
            self._check()
            await trio.sleep(_POLL_SECONDS)

    async def groups(self, min_count: int = 1, max_count: int | None = None) -> list[VerifiedGroup]:
        """Return verified groups that were not given out before, of which this waits for at least `min_count`: at most
        `max_count`, or all that have come.
        """
        while True:
            await self._read_inbox()
            if len(self._waiting) >= min_count:
                break
            self._check()
            await trio.sleep(_POLL_SECONDS)
        groups, self._waiting = self._waiting[:max_count], [] if max_count is None else self._waiting[max_count:]
        self._given |= {group.digest for group in groups}
        return groups

    async def acknowledge(self, groups: Mapping[bytes, int]) -> None:
        """Remember durably from which groups, by digest and version, the caller has learned; delete batches without
        others.
        """
        async with self._acknowledging:
            versions = {**self._acknowledged, **groups}.items()
            recent = {d: v for d, v in versions if not is_too_stale(v, self.version, self._max_staleness)}
            record = AcknowledgedGroups(groups=tuple(sorted(recent.items())))
            await self._node.state.put(ACKNOWLEDGED, record.to_bytes())
            self._acknowledged = recent
        await self._inbox.keep(self._is_needed)

    async def _read_inbox(self) -> None:
        """Read what has come, and drop what has become too stale meanwhile."""
        new_groups = await self._inbox.read()
        groups = {group.digest: group for group in self._waiting + new_groups if group.digest not in self._given}
        self._waiting = [group for group in groups.values() if self._is_needed(group.digest, group.version)]
        await self._inbox.keep(self._is_needed)

    def _is_needed(self, digest: bytes, version: int) -> bool:
        return digest not in self._acknowledged and not is_too_stale(version, self.version, self._max_staleness)


def _not_finite(weights: Weights) -> str:
    """Return the name of a tensor with an infinity or a NaN; empty if there is none."""
    return next((name for name, tensor in weights.items() if not tensor.isfinite().all()), "")
