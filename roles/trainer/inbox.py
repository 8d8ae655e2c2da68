"""The inbox, as every training loop reads it: that of this program, that of somebody else, and that of a site."""

from collections.abc import Callable

import trio

from roles.ports import ObjectStore
from roles.trainer.spool import INBOX
from roles.trainer.verified_batch import VerifiedBatch, VerifiedGroup


class Inbox:
    """The batches that the collector delivers, until no group of them is needed. Tasks may share it.

    After a restart every batch that is still there is read again, and a collector that was killed may deliver one
    twice. So its reader remembers which groups it has.
    """

    def __init__(self, state: ObjectStore) -> None:
        self._state = state
        self._batches: dict[str, dict[bytes, int]] = {}  # by path, versions of the groups by digest
        self._lock = trio.Lock()  # a batch that is deleted while the inbox is listed would be read again

    async def read(self) -> list[VerifiedGroup]:
        """Return the groups of the batches that have come since the last call."""
        async with self._lock:
            paths = {item.path async for item in self._state.list(INBOX)} - self._batches.keys()
            files = [(path, await self._state.get(path, VerifiedBatch.max_bytes)) for path in sorted(paths)]
            # from here on without a checkpoint: a caller that is cancelled has all groups, or none
            batches = {path: VerifiedBatch.from_bytes(data).groups for path, data in files}
            self._batches |= {path: {g.digest: g.version for g in groups} for path, groups in batches.items()}
        return [group for groups in batches.values() for group in groups]

    async def keep(self, is_needed: Callable[[bytes, int], bool]) -> None:
        """Delete the batches that were read and have no group that is needed.

        Args:
            is_needed: tells it of a group's digest and version.
        """
        async with self._lock:
            for path, groups in [*self._batches.items()]:
                if not any(is_needed(digest, version) for digest, version in groups.items()):
                    await self._state.delete(path)
                    del self._batches[path]


def is_too_stale(version: int, newest: int, max_staleness: int) -> bool:
    """Return whether a group of a version is too old to be trained on, given the newest version."""
    return newest - version > max_staleness
