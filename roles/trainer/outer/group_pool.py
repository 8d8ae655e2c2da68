"""The verified groups that a site has and no manifest has used up: those that are dealt to it in a round.

The pool is in memory only. What is in it lies in the inbox until it is used up or too stale, so a site that starts
again reads it again.
"""

from collections.abc import Collection, Iterable, Sequence

from protocol.outer.round_checks import owner
from roles.ports import ObjectStore
from roles.trainer.spool import INBOX
from roles.trainer.verified_batch import VerifiedBatch, VerifiedGroup


class GroupPool:
    """Groups by digest.

    Args:
        max_staleness: versions behind the newest one; older groups leave.
        dynamic_filtering: whether groups whose rewards do not differ are left out.
    """

    def __init__(self, run_id: bytes, max_staleness: int, *, dynamic_filtering: bool = True) -> None:
        self._dynamic_filtering = dynamic_filtering
        self._run_id = run_id
        self._max_staleness = max_staleness
        self._groups: dict[bytes, VerifiedGroup] = {}
        self._used: set[bytes] = set()
        self._digests_by_path: dict[str, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    async def read_inbox(self, state: ObjectStore, version: int) -> None:
        """Add the groups of the inbox's new objects, and delete the objects of which no group remains."""
        inbox_paths = {item.path async for item in state.list(INBOX)}
        for path in sorted(inbox_paths - self._digests_by_path.keys()):
            batch = VerifiedBatch.from_bytes(await state.get(path, VerifiedBatch.max_bytes))
            self._digests_by_path[path] = {group.digest for group in batch.groups}
            for group in batch.groups:
                if (group.informative or not self._dynamic_filtering) and group.digest not in self._used:
                    self._groups.setdefault(group.digest, group)
        for digest in [d for d, group in self._groups.items() if version - group.version > self._max_staleness]:
            del self._groups[digest]
        for path, digests in list(self._digests_by_path.items()):
            if digests.isdisjoint(self._groups):
                await state.delete(path)
                del self._digests_by_path[path]

    def use_up(self, digests: Iterable[bytes]) -> None:
        """Remove groups that a manifest has named; a later copy of them is not added."""
        for digest in digests:
            self._used.add(digest)
            self._groups.pop(digest, None)

    def dealt(
        self, turns: Collection[int], workers: Sequence[bytes], worker: bytes, without: Collection[bytes] = ()
    ) -> list[bytes]:
        """Return the digests of the groups that belong to a worker in each of some turns, the newest versions first.

        Args:
            turns: of the rounds (`protocol.outer.round_checks.turn_of`).
            without: digests of groups to leave out.
        """
        own = [
            (-group.version, digest)
            for digest, group in self._groups.items()
            if digest not in without and all(owner(self._run_id, turn, digest, workers) == worker for turn in turns)
        ]
        return [digest for _, digest in sorted(own)]

    def groups(self, digests: Iterable[bytes]) -> list[VerifiedGroup]:
        """Return groups by their digests."""
        return [self._groups[digest] for digest in digests]
