"""Makes heads, and writes a trainer's to storage: after each version and anchor, and before the last head expires."""

from contextlib import suppress
from typing import Final

import trio

from protocol import paths
from protocol.chain.manifest import Head
from protocol.encoding import content_digest
from protocol.identity.signing import sign
from roles.node.identity import Node
from roles.ports import StoreError
from roles.trainer.publish.fencing import Fence
from roles.trainer.publish.history import History
from roles.trainer.publish.retention import retained_range

_CLOCK_SECONDS: Final = 1.0  # between two readings of the clock, which somebody may set


def make_head(
    history: History, newest: int, keep_patches: int, keep_anchors: int, run_id: bytes, revision: int, expires_ms: int
) -> Head:
    """Return the head that shows everything up to version `newest`, by the newest revision of the authority that the
    publisher knows, until a time in milliseconds since the Unix epoch.
    """
    # A newer version's anchor may be complete already; a head of this version cannot name it.
    available = {version for version in history.anchors if version <= newest}
    anchors, oldest_patch = retained_range(newest, available, history.first_patch, keep_patches, keep_anchors)
    base = anchors[0]
    head = Head(
        run=run_id,
        epoch=history.epoch,
        base=base,
        manifests=tuple(history.manifests[version].digest for version in range(base, newest + 1)),
        anchors=anchors,
        oldest_patch=oldest_patch,
        revision=revision,
        expires_ms=expires_ms,
    )
    # The second opinion on the invariant of retention.py, from the record itself: a signed head cannot be taken back.
    history.check_available(head)
    return head


class HeadWriter:
    """Writes one publisher's heads, with as many patches and anchors as `keep` says, one head at a time."""

    def __init__(
        self, node: Node, history: History, fence: Fence, keep: tuple[int, int], expiry_offset_ms: int
    ) -> None:
        self._node = node
        self._history = history
        self._fence = fence
        self._keep = keep
        self._expiry_offset_ms = expiry_offset_ms
        self._lock = trio.Lock()
        self._shown_version = history.published_version
        self._expiry = 0.0  # seconds since the Unix epoch, without the offset

    def head(self, newest: int, revision: int = 0, expires_ms: int = 0) -> Head:
        """Return the head that shows everything up to version `newest`."""
        return make_head(self._history, newest, *self._keep, self._node.run_id, revision, expires_ms)

    async def begin(self) -> None:
        """Take an epoch, before the first head is written; learn which version storage shows already."""
        self._shown_version = max(self._shown_version, await self._fence.begin())

    async def write(self, newest: int) -> None:
        """Write a head that shows everything up to version `newest`."""
        node = self._node
        # Outside of the lock: it waits for as long as the clock is wrong, and the proof that follows is then quick.
        await node.time.wait_for_newest_round()
        async with self._lock:
            # Read before the fence checks for rewinds: if one arrives after the check, this head carries the number
            # before it, and followers refuse the head.
            revision = node.revisions.number
            with suppress(StoreError):  # a store that does not answer shows no other trainer; the put is retried anyway
                await self._fence.check()
            # A head never shows less than the one before. An anchor's upload may end after a version's head was written
            # and before the version is marked published, so `newest` may be lower than what is shown.
            self._shown_version = max(newest, self._shown_version)
            self._expiry = await node.time.proven_time() + node.run.head_ttl
            head = self.head(self._shown_version, revision, int(self._expiry * 1000) - self._expiry_offset_ms)
            # Before the put: if the answer is lost, the next check finds this head and must know it as its own.
            self._fence.own_heads.add(content_digest(head.to_bytes()))
            await node.publish(paths.head(node.key.public), sign(head, node.key))

    async def keep_fresh(self) -> None:
        """Write the head again before it expires, and after the clock was set, for as long as this process lives."""
        node = self._node
        while True:
            await trio.sleep(_CLOCK_SECONDS)
            await self._fence.obey_rewind()
            # After a third of its life it is renewed, so that storage may be silent for the other two. More than its
            # whole life is left only where the clock was set back.
            remaining = self._expiry - node.time.now()
            if self._history.published_version >= 0 and not node.run.head_ttl * 2 / 3 < remaining <= node.run.head_ttl:
                await self.write(self._history.published_version)
