"""What every role is given: the run's rules, this node's key and state, and the ports."""

from collections.abc import Awaitable, Callable
from dataclasses import InitVar, dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import trio

from protocol import paths
from protocol.identity.authority import Authority, Revisions
from protocol.identity.participant import Announcement, Role
from protocol.identity.signing import SigningKey, sign
from protocol.run import RunManifest
from roles.node.participant_memory import Alarms, AnnouncementCache, Backoff, RevisionRequests, Sightings, SilentMiners
from roles.node.retries import WaitReporter, keep_trying
from roles.node.timekeeping import Timekeeper
from roles.ports import Beacon, BeaconError, Clock, NotFoundError, ObjectStore, StoreError, Telemetry

if TYPE_CHECKING:  # it imports torch, which takes a second
    from protocol.pseudogradient import Keep

_ANNOUNCEMENT_CHECKS = 8  # whether storage still shows an announcement, before the next replaces it
_EXPIRY_SHIFTS = 97  # by milliseconds of the clock at a process's first announcement
_RETRY_SECONDS = 0.25
_CLOCK_POLL_SECONDS = 1.0  # between two looks at a clock that an operator may set
LOOKS = 40
"""Looks at storage in a window, evenly spaced."""
_LOOKS_BEFORE_EXPIRY = 8
_MAX_PUTS = 8  # of one object that the store acknowledges and does not show
_READ_BACKS = 3  # tries to get an answer
_READ_BACK_BYTES = 1 << 20  # objects up to this size are read back whole


@dataclass(frozen=True)
class Node:
    """One participant of a run."""

    run_id: bytes
    run: RunManifest  # the rules, already checked against the root keys; only `authority` says who may act now
    key: SigningKey  # signs what this node publishes
    name: str  # for people
    store: ObjectStore  # the shared medium, which may lie
    # this node's own durable storage, which does not; it waits while the disk refuses, StateError where that is no help
    state: ObjectStore
    clock: Clock
    beacon: Beacon
    telemetry: Telemetry
    run_sync: Callable[..., Awaitable[Any]]  # runs what computes for long off the event loop (inline in a simulation)
    # makes what keeps bytes as long as somebody refers to them: not in memory, but in a simulation
    scratch: Callable[[], "Keep"] = lambda: lambda data: data
    space: str = ""  # the URL where others read what this node writes; empty where they read the same store
    credential: Callable[["Node"], Awaitable[bytes]] | None = None  # makes the one that the admission policy requires
    shared_revisions: InitVar[Revisions | None] = None  # of another `Node` of this process; else a new history begins
    revisions: Revisions = field(init=False)  # of the authority, kept up to date by roles/authority_updates.py
    time: Timekeeper = field(init=False)  # what is proven; before it is, nothing is signed, no window closed for ever
    alarms: Alarms = field(init=False, default_factory=Alarms)  # that this node has not published yet
    backoff: Backoff = field(init=False, default_factory=Backoff)
    announcements: AnnouncementCache = field(init=False, default_factory=AnnouncementCache)
    sightings: Sightings = field(init=False, default_factory=Sightings)
    silent_miners: SilentMiners = field(init=False, default_factory=SilentMiners)
    revision_requests: RevisionRequests = field(init=False, default_factory=RevisionRequests)

    def __post_init__(self, shared_revisions: Revisions | None) -> None:
        object.__setattr__(self, "revisions", shared_revisions or Revisions(self.run_id, self.run.authority))
        object.__setattr__(self, "time", Timekeeper(self.beacon, self.run.beacon, self.clock, self.telemetry))

    @property
    def authority(self) -> Authority:
        """The keys that may act now. Read it at each use, since it may change between two."""
        return self.revisions.current

    @cached_property
    def _expiry_shift(self) -> float:
        """By how many seconds, less than 0.1, this process's announcements expire later. Without it, two processes with
        one key that act at the same moments would sign equal announcements, and neither would notice the other. No
        process starts again within so short a time, so that its announcements always expire later than its last ones.
        """
        return int(self.clock.now() * 1000) % _EXPIRY_SHIFTS / 1000

    def alarm(self, line: str) -> None:
        """Report a dishonest participant: in this node's log at once, and in its next summary if it is a validator."""
        if self.alarms.add(line):
            self.telemetry.event("alarm", error=line)

    def pace(self, least: float, looks: int = LOOKS) -> float:
        """Return how many seconds to wait between two looks at storage, of which each costs a request: so many looks
        in a window, but no shorter than `least`, and several before a head expires.
        """
        run = self.run
        window = run.schedule.rounds * run.beacon.period_ms / 1000
        return max(least, min(window / looks, run.head_ttl / _LOOKS_BEFORE_EXPIRY))

    def window(self) -> int:
        """Return the current window; negative before window 0 opens."""
        return self.run.window_at(self.clock.now())

    async def next_window(self, after: int, ahead: float = 0.0) -> int:
        """Wait until `ahead` seconds before the next window opens, and return its number. If the clock is put right
        meanwhile, the wait follows it; `after` is the last window that was waited for, ignored if it is later than the
        time allows.
        """

        def next_number() -> int:
            current = self.run.window_at(self.time.now())
            return max(min(after, current + 1), self.window(), -1) + 1

        window = next_number()
        while (seconds := self.run.opening_time(window) - ahead - self.clock.now()) > 0:
            await trio.sleep(min(seconds, _CLOCK_POLL_SECONDS))
            window = min(window, next_number())
        await trio.lowlevel.checkpoint()
        return window

    async def randomness(self, round_number: int) -> bytes:
        """Return the randomness of a round, however long an outage lasts: windows are delayed, never weakened."""
        while True:
            try:
                randomness = await self.time.randomness(round_number)
                self.time.late.over()
                return randomness
            except BeaconError as error:
                text = f"round {round_number}: {error}"
                self.time.late.waiting(
                    "beacon", text, "a relay answers: check the relays, or the trainer's node", "late"
                )
                now = self.clock.now()
                if now < self.run.beacon.round_time(round_number) or await self.time.has_come(
                    self.run.beacon.round_at(now)
                ):
                    raise
                await trio.sleep(_RETRY_SECONDS)

    async def publish(self, path: str, data: bytes) -> None:
        """Put an object until the store takes it and shows it; the store's decorators space the tries. A store that
        loses what it acknowledges may do so again: after a few times, each of them reported, this node goes on.
        """
        for _ in range(_MAX_PUTS):
            await self._put(path, data)
            if await self.is_readable(path, data):
                return
            await trio.sleep(_RETRY_SECONDS)

    async def _put(self, path: str, data: bytes) -> None:
        until = "storage takes the object: check provider, quota and credentials"
        reporter, put = WaitReporter(self.telemetry, "put-failed"), partial(self.store.put, path, data)
        await keep_trying(put, reporter, until, _RETRY_SECONDS)

    async def is_readable(self, path: str, data: bytes) -> bool:
        """Return whether the store shows an object that it acknowledged: a small one whole, of a large one the last
        byte. If the store does not answer (or this node may not read there), its acknowledgment counts.
        """
        offset = len(data) - 1 if len(data) > _READ_BACK_BYTES else 0
        size, is_shown = len(data) - offset, True
        for _ in range(_READ_BACKS):
            try:
                is_shown = await self.store.get(path, size, offset=offset, size=size) == data[offset:]
            except NotFoundError:
                is_shown = False
            except StoreError:
                continue
            break
        if not is_shown:
            error = (
                "storage took it and does not show it: storage has lost it, or another node with this key replaces it"
            )
            self.telemetry.event("put-lost", path=path, error=error)
        return is_shown

    async def announce(
        self, role: Role, seconds: float, groups: int = 0, version: int = 0, arithmetic: str = ""
    ) -> bytes:
        """Publish an announcement that expires after some seconds, a miner's with its pledge; return its bytes."""
        expires = await self.time.proven_time() + seconds + self._expiry_shift
        data = sign(await self.announcement(role, expires, groups, version, arithmetic), self.key)
        await self.publish(paths.participant(self.key.public), data)
        return data

    async def announcement(
        self, role: Role, expires: float, groups: int = 0, version: int = 0, arithmetic: str = ""
    ) -> Announcement:
        """Return this node's announcement until a moment (seconds since the epoch), a miner's with its credential."""
        return Announcement(
            run=self.run_id,
            key=self.key.public,
            role=role,
            name=self.name,
            space=self.space,
            groups=groups,
            version=version,
            arithmetic=arithmetic,
            expires_ms=int(expires * 1000),
            credential=await self.credential(self) if self.credential and role == "miner" else b"",
        )

    async def keep_announced(self, role: Role, seconds: float) -> None:
        """Announce this node now, and again before the announcement expires or where storage has lost it, for ever."""
        while True:
            data = await self.announce(role, seconds)
            for _ in range(_ANNOUNCEMENT_CHECKS):
                await trio.sleep(seconds / 3 / _ANNOUNCEMENT_CHECKS)
                if not await self.is_readable(paths.participant(self.key.public), data):
                    break
