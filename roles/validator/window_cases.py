"""The cases of a window: the pledges made before it opened, and the commitments that were in storage in time."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import trio

from protocol import paths
from protocol.errors import MalformedError, ProtocolError
from protocol.identity.admission import draw_places
from protocol.identity.participant import Announcement
from protocol.identity.signing import Signed
from protocol.rollout.batch import Commitment
from roles.gather import gather
from roles.node.identity import Node
from roles.participants import find_participants
from roles.ports import NotFoundError, StoreError, TooLargeError
from roles.records import fetch_record

_AT_ONCE = 256  # commitments that are being read
_COMMITMENT_BYTES = 256  # of a commitment for each group of the run's quota: several times what a group takes


@dataclass(frozen=True)
class Case:
    """One miner's commitment in a window.

    Attributes:
        pledged_groups: what the miner had pledged.
        read_time: when this validator read the commitment, in seconds since the Unix epoch.
    """

    commitment: Signed[Commitment]
    pledged_groups: int
    read_time: float

    @property
    def miner(self) -> bytes:
        """The miner's key."""
        return self.commitment.record.miner

    @property
    def submitted_groups(self) -> int:
        """How many groups count: those beyond the pledge are ignored."""
        return min(self.pledged_groups, len(self.commitment.record.groups))


@dataclass(frozen=True)
class WindowCases:
    """A window's cases.

    Attributes:
        undelivered: the groups pledged by each miner that delivered nothing.
    """

    window: int
    cases: tuple[Case, ...]
    undelivered: Mapping[bytes, int]


class Pledges:
    """The groups that miners have announced to deliver in each window.

    A pledge of which nothing was delivered is void until the miner announces it anew.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._void: dict[bytes, int] = {}  # miner -> expiry of the newest announcement whose pledge is void
        self._current: dict[bytes, Announcement] = {}

    async def read(self, known: AbstractSet[bytes] = frozenset()) -> dict[bytes, int]:
        """Return the valid pledges in storage: groups by miner.

        Args:
            known: miners with a history, for which places are kept if there are too many.

        Raises:
            StoreError: the storage cannot be listed.
        """
        announcements = {item.key: item for item in await find_participants(self._node, "miner", known) if item.groups}
        self._void = {miner: expiry for miner, expiry in self._void.items() if miner in announcements}
        self._current = {
            miner: item for miner, item in announcements.items() if item.expires_ms > self._void.get(miner, -1)
        }
        quota = self._node.run.groups
        return {miner: min(quota, item.groups) for miner, item in self._current.items()}

    def void(self, miner: bytes) -> None:
        """Ignore the current pledge of a miner, which delivered nothing."""
        if miner in self._current:
            self._void[miner] = self._current[miner].expires_ms


async def read_window_cases(
    node: Node, window: int, pledges: Mapping[bytes, int], known: AbstractSet[bytes] = frozenset()
) -> WindowCases:
    """Return the commitments of a window by those who had pledged, as far as they can be read before the second round.

    A commitment that cannot be read because storage does not answer is left out, and so is one that comes later: no
    miner is blamed for it.

    Args:
        pledges: groups by miner.
        known: miners with a history, for which places are kept if there are too many.

    Raises:
        BeaconError: the window's opening is no longer due.
    """
    cases: list[Case] = []
    undelivered: dict[bytes, int] = {}

    async def fetch(miner: bytes) -> Case:
        path = paths.commitment(miner, window)
        signed = await fetch_record(node, Commitment, path, _COMMITMENT_BYTES * node.run.groups)
        if not signed.record.groups:
            raise MalformedError("has no groups", path)
        return Case(signed, pledges[miner], node.time.now())

    async def read(miner: bytes) -> None:
        try:
            try:
                case = await fetch(miner)
            except (NotFoundError, TooLargeError, ProtocolError):  # storage may show the commitment the next time
                case = await fetch(miner)
        except NotFoundError:
            undelivered[miner] = pledges[miner]
        except (ProtocolError, TooLargeError) as error:
            node.telemetry.event("commitment-refused", miner=miner.hex(), window=window, error=str(error))
            undelivered[miner] = pledges[miner]
        except StoreError as error:
            node.telemetry.event("commitment-unread", miner=miner.hex(), window=window, error=str(error))
        else:
            cases.append(case)

    opening = await node.randomness(node.run.schedule.opening(window))
    miners = draw_places(opening, pledges, known, node.authority.admission.miners)
    seconds = node.run.beacon.round_time(node.run.schedule.audit(window)) - node.time.now()
    with trio.move_on_after(max(0.0, seconds)) as scope:
        await gather(read, miners, at_once=_AT_ONCE)
    if scope.cancelled_caught:
        error = (
            f"of {len(miners)} commitments, {len(cases) + len(undelivered)} were read before the second round was due"
        )
        node.telemetry.event("commitments-unread", window=window, error=error)
    return WindowCases(window, tuple(cases), undelivered)
