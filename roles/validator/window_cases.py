"""What is to be judged in a window: pledges that stood before it opened, and the commitments that lay in storage in
time.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import trio

from protocol import limits, paths
from protocol.errors import MalformedError, ProtocolError
from protocol.identity.admission import lottery
from protocol.identity.participant import Announcement
from protocol.identity.signing import Signed, open_signed
from protocol.rollout.batch import Commitment
from roles.gather import gather
from roles.node.identity import Node
from roles.participants import participants
from roles.ports import NotFoundError, StoreError, TooLargeError

_AT_ONCE = 256  # commitments that are being read
_COMMITMENT_BYTES = 256  # of a commitment for each group that a miner may deliver: several times what it takes


@dataclass(frozen=True)
class Case:
    """One miner's commitment, what it had pledged (groups), and when this validator saw it (seconds since the Unix
    epoch).
    """

    commitment: Signed[Commitment]
    pledged: int
    seen: float

    @property
    def miner(self) -> bytes:
        """The miner's key."""
        return self.commitment.record.miner

    @property
    def submitted(self) -> int:
        """Groups that count: those beyond the pledge are not looked at."""
        return min(self.pledged, len(self.commitment.record.groups))


@dataclass(frozen=True)
class WindowCases:
    """A window's cases, and the miners that delivered nothing of what they had pledged (groups)."""

    window: int
    cases: tuple[Case, ...]
    undelivered: Mapping[bytes, int]


class Pledges:
    """What miners have announced to deliver. A pledge that was not kept at all is void until it is announced anew."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._broken: dict[bytes, int] = {}  # miner -> expiry of the announcement that it did not keep
        self._standing: dict[bytes, Announcement] = {}

    async def take(self) -> dict[bytes, int]:
        """The pledges that stand now: groups by miner.

        Raises:
            StoreError: the storage cannot be listed.
        """
        announced = {item.key: item for item in await participants(self._node, "miner") if item.groups}
        self._broken = {miner: expiry for miner, expiry in self._broken.items() if miner in announced}
        self._standing = {
            miner: item for miner, item in announced.items() if item.expires_ms > self._broken.get(miner, -1)
        }
        most = self._node.run.groups
        return {miner: min(most, item.groups) for miner, item in self._standing.items()}

    def broken_by(self, miner: bytes) -> None:
        """A miner delivered nothing: its announcement counts no more."""
        if miner in self._standing:
            self._broken[miner] = self._standing[miner].expires_ms


async def docket(node: Node, window: int, pledges: Mapping[bytes, int]) -> WindowCases:
    """The commitments of a window by those who had pledged, as far as they can be read before the second round is due.

    One that cannot be read by a fault of the storage is left out, and so is what comes later: it is held against
    nobody.

    Raises:
        BeaconError: the window's opening is not due any more.
    """

    largest = min(limits.MAX_COMMITMENT_BYTES, _COMMITMENT_BYTES * node.run.groups) + limits.MAX_ENVELOPE_BYTES

    async def open_commitment(miner: bytes, path: str) -> Case:
        data = await node.store.get(path, largest)
        signed = open_signed(data, Commitment, [miner])
        record = signed.record
        if (record.run, record.window, record.miner) != (node.run_id, window, miner) or not record.groups:
            raise MalformedError("of another run, window or miner, or empty", path)
        return Case(signed, pledges[miner], node.time.now())

    async def read(miner: bytes) -> Case | bytes | None:
        path = paths.commitment(miner, window)
        try:
            try:
                return await open_commitment(miner, path)
            except (NotFoundError, ProtocolError):  # the storage may have lied, once: a pledge is not broken by that
                return await open_commitment(miner, path)
        except NotFoundError:
            return miner
        except (ProtocolError, TooLargeError) as error:
            node.telemetry.event("commitment-refused", miner=miner.hex(), window=window, error=str(error))
            return miner
        except StoreError as error:
            node.telemetry.event("commitment-unread", miner=miner.hex(), window=window, error=str(error))
            return None

    opening = await node.randomness(node.run.schedule.opening(window))
    drawn = sorted(pledges, key=lambda key: lottery(opening, key))[: node.authority.admission.miners]
    cases: list[Case] = []
    undelivered: dict[bytes, int] = {}

    async def note(miner: bytes) -> None:
        found = await read(miner)
        if isinstance(found, Case):
            cases.append(found)
        elif found is not None:
            undelivered[found] = pledges[found]

    left = node.run.beacon.due(node.run.schedule.audit(window)) - node.time.now()
    with trio.move_on_after(max(0.0, left)) as in_time:
        await gather(note, drawn, at_once=_AT_ONCE)
    if in_time.cancelled_caught:
        error = (
            f"of {len(drawn)} commitments, {len(cases) + len(undelivered)} were read before the second round was due"
        )
        node.telemetry.event("commitments-unread", window=window, error=error)
    return WindowCases(window, tuple(cases), undelivered)
