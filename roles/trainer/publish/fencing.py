"""One publisher for one key: two trainers that start with the same key end with one (docs/adr/0222).

Storage without conditional writes keeps the last of two heads, so of two publishers that took the same epoch exactly
one finds a head that it did not write. It takes the next epoch, or stops if that head shows what it does not know;
whoever finds a higher epoch stops.
"""

from protocol import limits, paths
from protocol.chain.manifest import Head
from protocol.errors import ChainError, ProtocolError
from protocol.identity.signing import Signed, open_signed
from roles.node.identity import Node
from roles.ports import NotFoundError, TooLargeError
from roles.trainer.publish.history import History


class FencedError(Exception):
    """Another trainer publishes under this key; this one must stop."""


class Fence:
    """What one start of a publisher knows of other publishers under its key."""

    def __init__(self, node: Node, history: History) -> None:
        self._node = node
        self._history = history
        self._written: set[bytes] = set()

    async def begin(self) -> None:
        """Take the epoch behind the one in storage, if what is published is what this node remembers.

        Raises:
            ChainError: it is not: this state is not the one that it was published from.
            StoreError: the head cannot be read.
        """
        current = await self._current()
        if current is not None and not self._knows(current.record) and not self._outlived(current.record):
            raise ChainError(
                f"storage shows version {current.record.version}, which this node's state did not publish; "
                "use the state it was published from, or a new run",
                "resume",
            )
        newest, history = current.record.epoch if current is not None else 0, self._history
        own = history.epoch
        if history.writer not in (None, self._node.key.public) and self._node.revisions.rewind is not None:
            own = max(
                (signed.record.epoch for signed in history.manifests.values()), default=0
            )  # followers forgot theirs
        if max(own, newest) >= (1 << 53) - 1:
            raise ChainError("an epoch that nobody can follow: the key is stolen; revoke it with --rewind", "resume")
        await history.begin_epoch(max(own, newest) + 1)

    def _outlived(self, head: Head) -> bool:
        """Whether a head is of this chain's own past, of which nothing is kept: storage was rolled back."""
        return head.epoch <= self._history.epoch and head.version < min(self._history.manifests, default=0)

    async def check(self) -> None:
        """Look for another publisher before a head is written.

        Raises:
            FencedError: there is one, and it goes on.
            StoreError: the head cannot be read.
        """
        current, history = await self._current(), self._history
        if current is None or current.digest in self._written or current.record.epoch < history.epoch:
            return
        head = current.record
        if head.epoch > history.epoch or not self._knows(head):
            raise FencedError(
                f"another trainer publishes under this key (epoch {head.epoch} version {head.version}, "
                f"this one epoch {history.epoch} version {history.published})"
            )
        self._node.telemetry.event("epoch-contested", epoch=head.epoch)
        await history.begin_epoch(head.epoch + 1)

    def wrote(self, digest: bytes) -> None:
        """This publisher is about to write the head of this digest."""
        self._written.add(digest)

    def _knows(self, head: Head) -> bool:
        """Whether a head shows no more than this node has published or promised."""
        ours = self._history.manifests.get(head.version)
        promised = self._history.published + 1
        return head.version <= promised and ours is not None and ours.digest == head.digest(head.version)

    async def _current(self) -> Signed[Head] | None:
        """The head in storage; None where there is none. What is no head of ours is a stranger's, and is written over."""
        key = self._node.key.public
        path = paths.head(key)
        try:
            data = await self._node.store.get(path, limits.MAX_HEAD_BYTES + limits.MAX_ENVELOPE_BYTES)
            return open_signed(data, Head, [key])
        except NotFoundError:
            return None
        except (ProtocolError, TooLargeError) as error:
            self._node.telemetry.event("strange-head", path=path, error=str(error))
            return None
