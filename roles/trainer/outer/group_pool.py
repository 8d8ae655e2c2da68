"""The verified groups that a site has and no manifest has used up: those that are dealt to it in a round.

The pool is in memory only. What is in it lies in the inbox until it is used up or too stale, so a site that starts
again reads it again.
"""

from collections.abc import Collection, Iterable, Sequence

from protocol.outer.round_checks import owner
from roles.trainer.inbox import Inbox, is_too_stale
from roles.trainer.verified_batch import VerifiedGroup


class GroupPool:
    """Groups by digest.

    Args:
        max_staleness: versions behind the newest one; older groups leave.
        dynamic_filtering: whether groups whose rewards do not differ are left out.
    """

    def __init__(self, inbox: Inbox, run_id: bytes, max_staleness: int, *, dynamic_filtering: bool = True) -> None:
        self._inbox = inbox
        self._dynamic_filtering = dynamic_filtering
        self._run_id = run_id
        self._max_staleness = max_staleness
        self._groups: dict[bytes, VerifiedGroup] = {}
        self._used = frozenset[bytes]()

    def __len__(self) -> int:
        return len(self._groups)

    async def read_inbox(self, version: int) -> None:
        """Add what has come, drop what is too stale for a version, and delete the batches of which no group remains."""
        for group in await self._inbox.read():
            if (group.informative or not self._dynamic_filtering) and group.digest not in self._used:
                self._groups.setdefault(group.digest, group)
        groups = self._groups.items()
        self._groups = {d: g for d, g in groups if not is_too_stale(g.version, version, self._max_staleness)}
        await self._inbox.keep(lambda digest, _: digest in self._groups)

    def use_up(self, digests: Iterable[bytes]) -> None:
        """Set which groups manifests have named, without those that are too stale by now. They leave, and later copies
        of them are not added.
        """
        self._used = frozenset(digests)
        self._groups = {digest: group for digest, group in self._groups.items() if digest not in self._used}

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
