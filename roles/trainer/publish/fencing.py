"""Fencing: of two trainers that start with the same key, one stops (docs/adr/0220).

Storage without conditional writes keeps the last of two heads, so of two publishers that took the same epoch exactly
one reads a head that it did not write. It takes the next epoch, or stops if that head shows versions that it does not
know. A publisher that reads a higher epoch than its own stops.

A publisher also stops if the roots take back versions that it has published: what it would go on with does not count.
"""

from protocol import paths
from protocol.chain.manifest import Head
from protocol.chain.verifier import is_taken_back
from protocol.errors import ChainError, ProtocolError
from protocol.identity.authority import Revisions
from protocol.identity.signing import Signed, open_signed
from roles.node.identity import Node
from roles.ports import FencedError, NotFoundError, StateError, TooLargeError
from roles.records import fetch_envelope
from roles.trainer.publish.history import History
from roles.trainer.spool import CHAIN


class Fence:
    """Detects other publishers under the key of this one. It lives as long as the publisher's process."""

    def __init__(self, node: Node, history: History) -> None:
        self._node = node
        self._history = history
        self.own_heads: set[bytes] = set()  # digests of the heads that this process wrote, or is about to write

    async def begin(self) -> int:
        """Take an epoch higher than all before; ChainError if the chain in storage was published from another state.
        Return the newest version of this node that storage shows and the roots have not taken back; -1 for none. A
        process that was killed after it wrote a head has shown one version more than its state calls published.
        """
        # A version that is signed counts here, marked or not: a killed process may have shown it.
        await self.obey_rewind(self._history.promised_version)
        # A head that this state cannot explain was published from another state. To publish on would be a fork.
        current = await read_own_head(self._node)
        if current is not None and not self._knows(current.record) and not self._is_obsolete(current.record):
            raise ChainError(
                f"storage shows version {current.record.version}, which this node's state did not publish; "
                "use the state it was published from, or run `grailnode repair` to continue what is published",
                "resume",
            )
        head_epoch, history = current.record.epoch if current is not None else 0, self._history
        own_epoch = history.epoch
        if history.writer not in (None, self._node.key.public) and self._node.revisions.rewind is not None:
            # after a rewind followers know the epochs of the remaining manifests only
            own_epoch = max((signed.record.epoch for signed in history.manifests.values()), default=0)
        # Higher than both: than the state's, as storage may be rolled back, and than storage's, as the state may be
        # older.
        if max(own_epoch, head_epoch) >= (1 << 53) - 1:
            raise ChainError("an epoch that nobody can follow: the key is stolen; revoke it with --rewind", "resume")
        await history.begin_epoch(max(own_epoch, head_epoch) + 1)
        if current is None or not self._knows(current.record) or is_taken_back(current.record, self._node.revisions):
            return -1
        return current.record.version

    def _is_obsolete(self, head: Head) -> bool:
        """Whether a head is older than everything in the history, because storage was rolled back, or shows versions
        that the roots have taken back, and the history goes up to the last valid one.
        """
        if is_taken_back(head, self._node.revisions):
            return reaches_rewind(self._history, self._node.revisions)
        return head.epoch <= self._history.epoch and head.version < min(self._history.manifests, default=0)

    async def obey_rewind(self, newest: int | None = None) -> None:
        """Stop if the roots take back versions up to `newest`, which by default is the newest published one."""
        rewind, history = self._node.revisions.rewind, self._history
        if rewind is None or rewind[0] <= history.rewind:
            return
        number, point = rewind
        newest = history.published_version if newest is None else newest
        if newest > point.version:
            raise StateError(
                f"{CHAIN} of this node's state",
                f"revision {number} of the authority takes back the versions after {point.version}, of which this "
                f"node has published those up to {newest}",
            )
        await history.record_rewind(number)

    async def check(self) -> None:
        """Look for another publisher before a head is written; FencedError if there is one, and it goes on."""
        await self.obey_rewind()
        # A head of this process, or of an earlier epoch, or none: nobody else publishes, or who does has not seen the
        # present epoch yet and will stop when it does.
        current, history = await read_own_head(self._node), self._history
        if current is None or current.digest in self.own_heads or current.record.epoch < history.epoch:
            return
        # A higher epoch began later and wins. In the same epoch a head with versions that are unknown here shows that
        # the other one has published on.
        head = current.record
        if head.epoch > history.epoch or not self._knows(head):
            raise FencedError(
                f"another trainer publishes under this key (epoch {head.epoch} version {head.version}, "
                f"this one epoch {history.epoch} version {history.published_version}): only one may run, end the other"
            )
        # Both began at the same moment, and storage has kept the other's head. This one read it, so it takes the next
        # epoch; the other one will read that and stop.
        self._node.telemetry.event("epoch-contested", epoch=head.epoch)
        await history.begin_epoch(head.epoch + 1)

    def _knows(self, head: Head) -> bool:
        """Whether a head shows no more than this node has published or promised."""
        is_signed = self._history.has_signed(head.version, head.digest(head.version))
        return is_signed and head.version <= self._history.published_version + 1


def reaches_rewind(history: History, revisions: Revisions) -> bool:
    """Return whether a record contains the version to which the roots rewind the chain, or begins after it."""
    if revisions.rewind is None or min(history.manifests, default=0) > revisions.rewind[1].version:
        return True
    return history.has_signed(revisions.rewind[1].version, revisions.rewind[1].digest)


async def read_own_head(node: Node) -> Signed[Head] | None:
    """Return the head that storage shows under a trainer's own key, be it of another run: that must not be written
    over. None if there is none, or an object that this key did not sign as a head, which will be.
    """
    key = node.key.public
    path = paths.head(key)
    try:
        return open_signed(await fetch_envelope(node, Head, path), Head, [key])
    except NotFoundError:
        return None
    except (ProtocolError, TooLargeError) as error:
        node.telemetry.event("head-refused", path=path, error=str(error))
        return None
