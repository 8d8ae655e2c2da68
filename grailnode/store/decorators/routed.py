"""Routes each path to the store of its only writer, whom the first part of the path names (docs/spec/spaces.md).

The writer announces that store at the meeting point. Announcements stay in the node's own state until they expire, so
that a meeting point which forgets them, shows old ones, or hangs, hides nobody. Of several announcements of a key, the
one that expires last counts.
"""

import math
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial

import trio

from grailnode.store.checks import PermanentError, check_path, check_prefix, check_range, slice_object
from protocol import limits, paths
from protocol.errors import MalformedError, ProtocolError
from protocol.identity.participant import Announcement
from protocol.identity.signing import open_announced
from roles.gather import answer_of
from roles.ports import Clock, NotFoundError, ObjectInfo, ObjectStore, StateError, StoreError, TooLargeError

STATE_PREFIX = "announcements/"
"""Of the remembered announcements in the node's state."""

_MAX_BYTES = limits.MAX_ANNOUNCEMENT_BYTES + limits.MAX_ENVELOPE_BYTES

_SWEEP_SECONDS = 10.0  # at least, between two searches for announcements that have expired

_LOOKUP_SECONDS = 5.0  # for a newer announcement than a remembered one: readers of its space have no minutes to wait

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
        """Look up the announcement of a key, and return the one that is valid now; None when there is none. There need
        be no room to remember it: a crowd could fill that for ever.
        """
        data = b""
        try:
            data = await self.read(paths.participant(key))
        except NotFoundError:
            pass
        except StoreError:
            if await self.recall(key) is None:
                raise
        return await self.recall(key) or self._valid(key, data)

    async def recall(self, key: bytes) -> Announcement | None:
        """Return the remembered announcement of a key; None when there is none that is valid now."""
        entry = (await self._load()).get(key)
        return entry[0] if entry is not None and self._is_valid(entry[0]) else None

    async def read(self, path: str) -> bytes:
        """Return the bytes of the announcement at a path; invalid ones unchanged, for the reader to refuse."""
        key = paths.key_at_end(path)
        seconds = math.inf if await self.recall(key) is None else _LOOKUP_SECONDS
        try:
            data = await answer_of(partial(self.meeting.get, path, _MAX_BYTES), seconds, path)
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

    def _valid(self, key: bytes, data: bytes) -> Announcement | None:
        try:
            announcement = self._open(key, data)
        except ProtocolError:
            return None
        return announcement if self._is_valid(announcement) else None

    async def _remember(self, key: bytes, data: bytes) -> None:
        """Remember an announcement if it is valid and expires after the one that is remembered."""
        by_key = await self._load()
        previous = by_key.get(key)
        if previous is not None and previous[1] == data:
            return
        announcement = self._valid(key, data)
        if announcement is None or (previous and announcement.expires_ms <= previous[0].expires_ms):
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


SECONDS_BETWEEN_LOOKUPS = 60.0
"""How long the space of a key is used before its announcement is read again."""

SECONDS_BETWEEN_LOOKUPS_UNTIL_ANNOUNCED = 2.0
"""The same for a key that has announced nothing yet."""

_ANNOUNCEMENTS = paths.participants()


@dataclass(frozen=True)
class KnownStores:
    """The stores that a node knows by its configuration: its own, the meeting point, and those of peers by public key.

    The peers' take precedence over announcements. `beacon` is the first part of the paths of beacon rounds.
    """

    key: bytes
    own: ObjectStore
    meeting: ObjectStore
    beacon: str
    peers: Mapping[bytes, ObjectStore]


@dataclass(frozen=True)
class _Space:
    """The store of a key's objects, by an announcement read at a moment; no URL means the meeting point."""

    lookup_time: float
    valid_seconds: float
    url: str
    store: ObjectStore


@dataclass(eq=False)
class RoutedStore:
    """Implements ObjectStore over the spaces of all participants; `open_space` gets the URL and the owner's key."""

    stores: KnownStores
    directory: SpaceDirectory
    clock: Clock
    open_space: Callable[[str, bytes], ObjectStore]
    _spaces: dict[bytes, _Space] = field(default_factory=dict, init=False)

    async def put(self, path: str, data: bytes) -> None:
        await self._writable(path).put(path, data)

    async def delete(self, path: str) -> None:
        await self._writable(path).delete(path)

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        check_path(path)
        check_range(max_bytes, offset, size)
        if path.startswith(_ANNOUNCEMENTS) and path != paths.participant(self.stores.key):  # its own is read back
            return slice_object(await self._announcement(path), path, max_bytes, offset, size)
        return await (await self._readable(path)).get(path, max_bytes, offset=offset, size=size)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list; PermanentError for a prefix without a writer: many stores cannot be listed as
        one.
        """
        check_prefix(prefix)
        if "/" not in prefix:
            raise PermanentError(
                f"{prefix!r}: many stores cannot be listed as one; a prefix begins with the key of a writer"
            )
        if prefix.startswith(_ANNOUNCEMENTS):
            listing = self.directory.list(prefix, after)
        else:
            listing = (await self._readable(prefix)).list(prefix, after=after)
        async for info in listing:
            yield info

    async def _announcement(self, path: str) -> bytes:
        try:
            return await self.directory.read(path)
        except ProtocolError as error:
            raise NotFoundError(f"{path}: not the path of a participant's announcement") from error

    def _writable(self, path: str) -> ObjectStore:
        stores, first = self.stores, check_path(path).partition("/")[0]
        if first == stores.key.hex():
            return stores.own
        if first in {"runs", "revisions", stores.beacon} or path == paths.participant(stores.key):
            return stores.meeting
        raise PermanentError(f"{path}: belongs to another participant; this node does not write there")

    async def _readable(self, path: str) -> ObjectStore:
        stores, first = self.stores, path.partition("/")[0]
        if first == stores.key.hex():
            return stores.own
        try:
            key = bytes.fromhex(first) if first != stores.beacon else b""
        except ValueError:
            key = b""
        if len(key) != 32:
            return stores.meeting
        return stores.peers.get(key) or await self._space(key)

    async def _space(self, key: bytes) -> ObjectStore:
        """Return the store of a key's announced space, or the meeting point when it announced no space."""
        now, space = self.clock.now(), self._spaces.get(key)
        is_fresh = space is not None and space.lookup_time <= now < space.lookup_time + space.valid_seconds
        # a fresh space is not looked up, but another reader of the directory may have seen a newer announcement
        announcement = await (self.directory.recall(key) if is_fresh else self.directory.announcement(key))
        known_url = space.url if space is not None and is_fresh else ""  # also of one that is not remembered
        url = announcement.space if announcement is not None else known_url
        if space is not None and space.url == url:
            store = space.store
        else:
            store = self.open_space(url, key) if url else self.stores.meeting
        if space is None or space.store is not store or not is_fresh:
            is_announced = announcement is not None
            seconds = SECONDS_BETWEEN_LOOKUPS if is_announced else SECONDS_BETWEEN_LOOKUPS_UNTIL_ANNOUNCED
            self._spaces[key] = _Space(now, seconds, url, store)
        return store
