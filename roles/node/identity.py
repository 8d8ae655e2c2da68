"""What every role is given: the run's rules, this node's key and state, and the ports."""

from collections.abc import Awaitable, Callable
from dataclasses import InitVar, dataclass, field
from typing import Any

import trio

from protocol import paths
from protocol.identity.authority import Authority, Revisions
from protocol.identity.participant import Announcement, Role
from protocol.identity.signing import SigningKey, sign
from protocol.run import RunManifest
from roles.node.alarms import Alarms
from roles.node.announcement_cache import AnnouncementCache
from roles.node.backoff import Backoff
from roles.node.timekeeping import Timekeeper
from roles.ports import Beacon, BeaconError, Clock, NotFoundError, ObjectStore, StoreError, Telemetry

_RETRY_SECONDS = 0.25
_LOOK_SECONDS = 1.0  # between two looks at a clock that somebody may set
_MOST_LOSSES = 8  # of one object, acknowledged and not there
_READ_BACKS = 3  # tries to get an answer
_READ_BACK_BYTES = 1 << 20  # objects up to this size are read back whole


async def _no_proof(node: "Node") -> bytes:
    return b""


@dataclass(frozen=True)
class Node:
    """One participant of a run.

    Attributes:
        run_id, run: the rules, already checked against the root keys. Who may act now is said by `authority` alone.
        key: signs what this node says; name: what it calls itself.
        store: the shared medium, which may lie; state: this node's own durable storage, which does not.
        space: the URL where others read what this node writes; empty where they read the same store.
        run_sync: runs a function that computes for long, off the event loop's thread (inline in a simulation).
        proof: gives what the run's admission policy asks of this node's announcements
            (grailnode/node/admission_proof.py).
        known, revisions: what this node knows of the authority, shared with whoever gives `known` (else the run
            manifest's word); kept up to date by roles/authority_updates.py.
        time: what is proven about the time; whatever is signed or closed for ever rests on that, and not on the clock
            alone.
        alarms: lies that this node met and has not published yet; backoff: participants that it need not look at yet;
            announcements: those whose signatures it has checked.
    """

    run_id: bytes
    run: RunManifest
    key: SigningKey
    name: str
    store: ObjectStore
    state: ObjectStore
    clock: Clock
    beacon: Beacon
    telemetry: Telemetry
    run_sync: Callable[..., Awaitable[Any]]
    space: str = ""
    proof: Callable[["Node"], Awaitable[bytes]] = _no_proof
    known: InitVar[Revisions | None] = None
    revisions: Revisions = field(init=False)
    time: Timekeeper = field(init=False)
    alarms: Alarms = field(init=False, default_factory=Alarms)
    backoff: Backoff = field(init=False, default_factory=Backoff)
    announcements: AnnouncementCache = field(init=False, default_factory=AnnouncementCache)

    def __post_init__(self, known: Revisions | None) -> None:
        object.__setattr__(self, "revisions", known or Revisions(self.run_id, self.run.authority))
        object.__setattr__(self, "time", Timekeeper(self.beacon, self.run.beacon, self.clock, self.telemetry))

    @property
    def authority(self) -> Authority:
        """Who may act now: read it at each use, for it may change between two."""
        return self.revisions.current

    def alarm(self, line: str) -> None:
        """Tell of a lie: in this node's log at once, in its next summary if it is a validator."""
        if self.alarms.add(line):
            self.telemetry.event("alarm", error=line)

    def window(self) -> int:
        """The current window; negative before window 0 opens."""
        return self.run.window_at(self.clock.now())

    async def next_window(self, after: int, ahead: float = 0.0) -> int:
        """Wait for the next window behind one: its number, so many seconds before it opens. Follows a clock that is put
        right.

        Args:
            after: a window that was waited for before; one that the time does not bear out any more counts for nothing.
        """

        def following() -> int:
            reached = self.run.window_at(self.time.now())
            return max(min(after, reached + 1), self.window(), -1) + 1

        window = following()
        while (left := self.run.opening_time(window) - ahead - self.clock.now()) > 0:
            await trio.sleep(min(left, _LOOK_SECONDS))
            window = min(window, following())
        await trio.lowlevel.checkpoint()
        return window

    async def randomness(self, round_number: int) -> bytes:
        """The randomness of a round, however long the beacon's outage lasts: windows are delayed, never weakened.

        Raises:
            BeaconError: the round is not due any more, as this machine's clock was ahead; or later ones are out, and
                this one cannot be had.
        """
        while True:
            try:
                return await self.time.randomness(round_number)
            except BeaconError as error:
                self.telemetry.event("beacon-late", round=round_number, error=str(error))
                now = self.clock.now()
                if now < self.run.beacon.due(round_number) or await self.time.has_come(self.run.beacon.round_at(now)):
                    raise
                await trio.sleep(_RETRY_SECONDS)

    async def publish(self, path: str, data: bytes) -> None:
        """Put an object until the store takes it and shows it; the store's decorators space the tries.

        What storage acknowledges and loses, it may lose again: after a few times this node goes on, and has said so.
        """
        for _ in range(_MOST_LOSSES):
            await self._put(path, data)
            if await self.shows(path, data):
                return
            await trio.sleep(_RETRY_SECONDS)

    async def _put(self, path: str, data: bytes) -> None:
        while True:
            try:
                return await self.store.put(path, data)
            except StoreError as error:
                self.telemetry.event("put-failed", path=path, error=str(error))
                await trio.sleep(_RETRY_SECONDS)

    async def shows(self, path: str, data: bytes) -> bool:
        """Whether an object that the store acknowledged is there: the whole of a small one, the last byte of a large
        one.

        Where the store gives no answer (or this node may not read there), its acknowledgment counts.
        """
        offset = max(0, len(data) - 1) if len(data) > _READ_BACK_BYTES else 0
        size = len(data) - offset
        there = True
        for _ in range(_READ_BACKS):
            try:
                there = await self.store.get(path, size, offset=offset, size=size) == data[offset:]
            except NotFoundError:
                there = False
            except StoreError:
                continue
            break
        if not there:
            self.telemetry.event("put-lost", path=path, error="acknowledged, and not what the store shows")
        return there

    async def announce(self, role: Role, seconds: float, groups: int = 0) -> None:
        """Make this node known for some seconds; a miner with the groups that it pledges."""
        record = await self.announcement(role, await self.time.moment() + seconds, groups)
        await self.publish(paths.participant(self.key.public), sign(record, self.key))

    async def announcement(self, role: Role, expires: float, groups: int = 0) -> Announcement:
        """What `announce` says, up to a time in seconds since the Unix epoch, with the proof that is asked of a miner."""
        return Announcement(
            run=self.run_id,
            key=self.key.public,
            role=role,
            name=self.name,
            space=self.space,
            groups=groups,
            expires_ms=int(expires * 1000),
            proof=await self.proof(self) if role == "miner" else b"",
        )

    async def keep_announced(self, role: Role, seconds: float) -> None:
        """Announce this node now, and again in time, for ever."""
        while True:
            await self.announce(role, seconds)
            await trio.sleep(seconds / 3)
