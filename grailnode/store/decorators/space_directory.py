"""Looks up announcements at the meeting point, and remembers them (docs/spec/spaces.md).

Announcements stay in the node's own state until they expire, so that a meeting point which forgets them, or shows old
ones, hides nobody. Of several announcements of a key, the one that expires last counts.
"""

from collections.abc import AsyncIterator, Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import trio

from protocol import limits, paths
from protocol.errors import MalformedError, ProtocolError
from protocol.identity.participant import Announcement
from protocol.identity.signing import open_announced
from roles.ports import Clock, NotFoundError, ObjectInfo, ObjectStore, StateError, StoreError, TooLargeError

STATE_PREFIX = "announcements/"
"""Of the remembered announcements in the node's state."""

_MAX_BYTES = limits.MAX_ANNOUNCEMENT_BYTES + limits.MAX_ENVELOPE_BYTES

_SWEEP_SECONDS = 10.0  # at least, between two searches for announcements that have expired

Entry = tuple[Announcement, bytes]
"""An announcement, and the signed bytes of it."""


@dataclass(eq=False)
class SpaceDirectory:
    """The announcements of one run by key, as the meeting point shows them, which may lie."""

    meeting: ObjectStore
    state: ObjectStore
    clock: Clock
    run_id: bytes
    authority_keys: Callable[[], AbstractSet[bytes]]  # that the authority names now, which `capacity` does not count
    capacity: int = limits.MAX_PARTICIPANTS
    _next_sweep: float = field(default=0.0, init=False)  # of expired announcements, in seconds since the Unix epoch
    _by_key: dict[bytes, Entry] | None = field(default=None, init=False)  # loaded from the state at the first use
    _loading: trio.Lock = field(default_factory=trio.Lock, init=False)

    async def announcement(self, key: bytes) -> Announcement | None:
        """Look up the announcement of a key, and return the one that is valid now; None when there is none."""
        try:
            await self.read(paths.participant(key))
        except NotFoundError:
            pass
        except StoreError:
            if await self.recall(key) is None:
                raise
        return await self.recall(key)

    async def recall(self, key: bytes) -> Announcement | None:
        """Return the remembered announcement of a key; None when there is none that is valid now."""
        entry = (await self._load()).get(key)
        return entry[0] if entry is not None and self._is_valid(entry[0]) else None

    async def read(self, path: str) -> bytes:
        """Return the bytes of the announcement at a path; invalid ones unchanged, for the reader to refuse."""
        key = paths.key_at_end(path)
        try:
            data = await self.meeting.get(path, _MAX_BYTES)
        except TooLargeError:
            data = b""
        except StoreError:
            if await self.recall(key) is None:
                raise
            return (await self._load())[key][1]
        await self._remember(key, data)
        return (await self._load())[key][1] if await self.recall(key) is not None else data

    async def list(self, prefix: str, after: str) -> AsyncIterator[ObjectInfo]:
        """Yield the announcements that the meeting point lists and those that are remembered, in order of path."""
        by_key = await self._load()
        sizes = {
            paths.participant(key): len(data)
            for key, (announcement, data) in by_key.items()
            if self._is_valid(announcement)
        }
        try:
            async for info in self.meeting.list(prefix, after=after):
                sizes[info.path] = info.size
                if len(sizes) >= 2 * limits.MAX_PARTICIPANTS:
                    break  # readers consider no more than this
        except StoreError:
            if not sizes:
                raise
        for path in sorted(sizes):
            if path.startswith(prefix) and path > after:
                yield ObjectInfo(path, sizes[path])

    def _is_valid(self, announcement: Announcement) -> bool:
        return announcement.expires_ms > self.clock.now() * 1000

    async def _load(self) -> dict[bytes, Entry]:
        if self._by_key is None:
            async with self._loading:
                if self._by_key is None:
                    self._by_key = await self._read_state()
        return self._by_key

    async def _read_state(self) -> dict[bytes, Entry]:
        by_key = {}
        async for info in self.state.list(STATE_PREFIX):
            try:
                data = await self.state.get(info.path, _MAX_BYTES)
                key = paths.key_at_end(info.path)
                by_key[key] = (self._open(key, data), data)
            except (StateError, ProtocolError):
                await self.state.delete(info.path)  # of another run, or damaged; the key's next one replaces it
        return by_key

    def _open(self, key: bytes, data: bytes) -> Announcement:
        signed = open_announced(data, Announcement)
        record = signed.record
        if signed.signers != (key,) or record.key != key or record.run != self.run_id:
            raise MalformedError("not of this key or run", "announcement")
        return record

    async def _remember(self, key: bytes, data: bytes) -> None:
        """Remember an announcement if it is valid and expires after the one that is remembered."""
        by_key = await self._load()
        previous = by_key.get(key)
        if previous is not None and previous[1] == data:
            return
        try:
            announcement = self._open(key, data)
        except ProtocolError:
            return
        if not self._is_valid(announcement) or (previous and announcement.expires_ms <= previous[0].expires_ms):
            return
        if previous is None and key not in self.authority_keys() and not await self._make_room(by_key):
            return
        by_key[key] = (announcement, data)
        await self.state.put(STATE_PREFIX + key.hex(), data)

    async def _make_room(self, by_key: dict[bytes, Entry]) -> bool:
        """Return whether there is room for another key; when it is full, first forget those that have expired."""
        if self._count(by_key) < self.capacity:
            return True
        if self.clock.now() < self._next_sweep:
            return False
        self._next_sweep = self.clock.now() + _SWEEP_SECONDS
        for key in [key for key, (announcement, _) in by_key.items() if not self._is_valid(announcement)]:
            del by_key[key]
            await self.state.delete(STATE_PREFIX + key.hex())
        return self._count(by_key) < self.capacity

    def _count(self, by_key: dict[bytes, Entry]) -> int:
        """Return how many announcements count towards the capacity."""
        return len(by_key) - len(self.authority_keys() & by_key.keys())
