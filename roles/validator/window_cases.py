"""The cases of a window: the pledges made before it opened, and the commitments that were in storage in time."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from protocol import paths
from protocol.errors import MalformedError, ProtocolError
from protocol.identity.admission import draw_places
from protocol.identity.participant import Announcement
from protocol.identity.signing import Signed
from protocol.judging.verdict import Reason
from protocol.rollout.batch import Commitment
from roles.gather import answer_of, gather
from roles.node.identity import Node
from roles.participants import find_participants
from roles.ports import NotFoundError, StoreError, TooLargeError
from roles.records import FOREIGN, fetch_record

_AT_ONCE = 256  # commitments that are being read
_READING, _TRY, _SILENCE = 0.9, 0.25, 0.5  # shares of the time until the second round: to read, for a try, to be blamed
_FEWEST_SECONDS = 0.5  # for a try
_PAUSES = 16  # in that time, one between two tries
_PROBES = 2  # of storage that has answered, before miners are blamed whose storage has not
_COMMITMENT_BYTES = 256  # of a commitment for each group of the run's quota: several times what a group takes


@dataclass(frozen=True)
class ServingVersions:
    """The versions by which the groups of a window may be generated: from the oldest to the newest.

    A version is chosen before the window's randomness is out, because a miner that could choose it later would see as
    many rollouts of each prompt as there are versions. What the trainer publishes after that is not the miner's fault.
    """

    oldest: int
    newest: int

    @classmethod
    def up_to(cls, newest: int, max_lag: int) -> "ServingVersions":
        """Return the newest version that serves a window and those that are up to `max_lag` versions older."""
        return cls(newest - max_lag, newest)

    def refusal(self, version: int, *, was_allowed: bool) -> Reason | None:
        """Return why no group of a version is judged; None if it may be used, or could when it was pledged."""
        if self.oldest <= version <= self.newest:
            return None
        return Reason.LAPSED if was_allowed or version < self.oldest else Reason.VERSION


@dataclass(frozen=True)
class Pledge:
    """What a miner has announced before a window opens."""

    groups: int  # how many groups it will deliver, within the run's quota
    version: int
    arithmetic: str
    # whether that version could be used in the window, as far as was known when the pledge was read
    was_allowed: bool = True


@dataclass(frozen=True)
class Case:
    """One miner's commitment in a window, of the version and the arithmetic that the miner had pledged."""

    commitment: Signed[Commitment]
    pledged_groups: int
    read_time: float  # when this validator read the commitment, in seconds since the Unix epoch
    version_was_allowed: bool = True  # `Pledge.was_allowed`

    @property
    def miner(self) -> bytes:
        return self.commitment.record.miner

    @property
    def submitted_groups(self) -> int:
        """How many groups count: those beyond the pledge are ignored."""
        return min(self.pledged_groups, len(self.commitment.record.groups))


@dataclass(frozen=True)
class WindowCases:
    """A window's cases, and the pledges of miners that delivered nothing, or with another version or arithmetic."""

    window: int
    cases: tuple[Case, ...]
    undelivered: Mapping[bytes, Pledge]


class Pledges:
    """The groups that miners have announced to deliver in each window, and the versions that they have chosen.

    A pledge of which nothing was delivered is void until the miner announces it anew. A pledge of a version that is too
    old for the next window, or of an arithmetic that the run does not admit, is none: who makes one gives up its place.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._void: dict[bytes, int] = {}  # miner -> expiry of the newest announcement whose pledge is void
        self._current: dict[bytes, Announcement] = {}

    async def read(
        self, history_keys: AbstractSet[bytes] = frozenset(), versions: ServingVersions | None = None
    ) -> dict[bytes, Pledge]:
        """Return the valid pledges in storage, by miner, for the versions that may be used in the next window; places
        are kept for miners with a history. Storage may show an older announcement than before: the newest one that was
        seen counts.
        """
        announcements = {item.key: item for item in await find_participants(self._node, "miner", history_keys)}
        self._void = {miner: expiry for miner, expiry in self._void.items() if miner in announcements}
        self._current = {
            miner: max(item, self._current.get(miner, item), key=lambda announcement: announcement.expires_ms)
            for miner, item in announcements.items()
        }
        return {
            miner: Pledge(
                min(self._node.run.groups, item.groups),
                item.version,
                item.arithmetic,
                versions is not None and versions.refusal(item.version, was_allowed=False) is None,
            )
            for miner, item in self._current.items()
            if item.groups and item.expires_ms > self._void.get(miner, -1)
            if versions is None or item.version >= versions.oldest
            if item.arithmetic in self._node.run.proof.miners
        }

    def void(self, miner: bytes) -> None:
        """Ignore the current pledge of a miner, which delivered nothing."""
        if miner in self._current:
            self._void[miner] = self._current[miner].expires_ms


async def read_window_cases(
    node: Node, window: int, pledges: Mapping[bytes, Pledge], history_keys: AbstractSet[bytes] = frozenset()
) -> WindowCases:
    """Return the commitments of a window by those who had pledged, as far as they can be read before the second round.

    A commitment to another version or arithmetic than was pledged is none. Nobody is blamed for what comes too late for
    this validator. But a miner whose storage does not answer, at several tries and while that of others does, has
    delivered nothing: it could otherwise withhold the windows that it does not like at no cost.
    """
    schedule, beacon = node.run.schedule, node.run.beacon
    opening = await node.randomness(schedule.opening(window))
    miners = draw_places(opening, pledges, history_keys, node.authority.admission.miners)
    # A crowd of new keys that hang would take all the time there is: miners that have worked go before them,
    # whether or not a read of theirs has failed. Of each kind, whoever hung in an earlier window comes last.
    miners.sort(key=lambda miner: (miner not in history_keys, miner in node.silent_miners))
    seconds = max(0.0, beacon.round_time(schedule.audit(window)) - node.time.now())
    reader = _CommitmentReader(node, window, pledges, seconds)
    with trio.move_on_after(seconds) as scope:
        with trio.move_on_after(_READING * seconds) as reading:
            await reader.read_all(miners)
        if reading.cancelled_caught and seconds >= 0.5 * (schedule.audit_rounds - schedule.commit_rounds) * (
            beacon.period_ms / 1000
        ):
            await reader.blame_silent_miners()
    node.silent_miners.add(reader.silent_miners)
    if scope.cancelled_caught or reading.cancelled_caught:
        read_count = len(reader.cases) + len(reader.undelivered)
        error = f"of {len(miners)} commitments, {read_count} were read before the second round was due"
        node.telemetry.event("commitments-unread", window=window, error=error)
    return WindowCases(window, tuple(reader.cases), reader.undelivered)


class _CommitmentReader:
    """Reads the commitments of one window, as many seconds as there are until the second round."""

    def __init__(self, node: Node, window: int, pledges: Mapping[bytes, Pledge], seconds: float) -> None:
        self._node = node
        self._window = window
        self._pledges = pledges
        self._seconds = seconds
        self._silent: dict[bytes, float] = {}  # by miner without an answer, when (trio's time) it was first asked
        self.cases: list[Case] = []
        self.undelivered: dict[bytes, Pledge] = {}

    async def read_all(self, miners: Sequence[bytes]) -> None:
        """Read the commitments of these miners, again and again those whose storage does not answer."""
        remaining = list(miners)
        while remaining:
            await gather(self._read, remaining, at_once=_AT_ONCE)
            remaining = list(self._silent)
            await trio.sleep(self._seconds / _PAUSES if remaining else 0)

    @property
    def silent_miners(self) -> list[bytes]:
        """The miners that were asked and whose storage has not answered."""
        return list(self._silent)

    async def blame_silent_miners(self) -> None:
        """Take commitments as undelivered if their storage has been silent for long, and other storage answers now."""
        patience = trio.current_time() - _SILENCE * self._seconds
        silent_miners = [miner for miner, asked_time in self._silent.items() if asked_time <= patience]
        for case in self.cases[:_PROBES] if silent_miners else ():
            with suppress(StoreError, ProtocolError):
                await self._fetch(case.miner)
                self.undelivered.update((miner, self._pledges[miner]) for miner in silent_miners)
                return

    async def _fetch(self, miner: bytes) -> Case:
        path, pledge = paths.commitment(miner, self._window), self._pledges[miner]
        read = partial(fetch_record, self._node, Commitment, path, _COMMITMENT_BYTES * self._node.run.groups)
        signed = await answer_of(read, max(_FEWEST_SECONDS, _TRY * self._seconds), path)
        if not signed.record.groups:
            raise MalformedError("has no groups", path)
        if signed.record.version != pledge.version:
            raise MalformedError(f"of version {signed.record.version}, where {pledge.version} was pledged", path)
        if signed.record.arithmetic != pledge.arithmetic:
            raise MalformedError(f"in {signed.record.arithmetic}, where {pledge.arithmetic} was pledged", path)
        return Case(signed, pledge.groups, self._node.time.now(), pledge.was_allowed)

    async def _read(self, miner: bytes) -> None:
        is_first = miner not in self._silent
        self._silent.setdefault(miner, trio.current_time())
        names: dict[str, Any] = {"miner": miner.hex(), "window": self._window}
        try:
            try:
                case = await self._fetch(miner)
            except FOREIGN:  # storage may show the commitment the next time
                case = await self._fetch(miner)
        except NotFoundError:
            self.undelivered[miner] = self._pledges[miner]
        except (ProtocolError, TooLargeError) as error:
            self._node.telemetry.event("commitment-refused", **names, error=str(error))
            self.undelivered[miner] = self._pledges[miner]
        except StoreError as error:
            if is_first:
                self._node.telemetry.event("commitment-unread", **names, error=str(error))
            return
        else:
            self.cases.append(case)
            self._node.silent_miners.forget(miner)
        del self._silent[miner]
