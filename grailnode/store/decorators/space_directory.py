"""The meeting point's announcements, remembered: storage that forgets or shows old ones hides nobody
(docs/spec/spaces.md).

Reads like the store behind it. What counts is remembered in the node's own state until it expires, and the announcement
of a key that expires last stands.
"""

from collections.abc import AsyncIterator, Collection

import trio

from protocol import limits, paths
from protocol.errors import MalformedError, ProtocolError
from protocol.identity.participant import Announcement
from protocol.identity.signing import open_announced
from roles.ports import Clock, NotFoundError, ObjectInfo, ObjectStore, StoreError, TooLargeError

REMEMBERED = "announcements/"
"""Prefix in the node's state."""

_MAX_BYTES = limits.MAX_ANNOUNCEMENT_BYTES + limits.MAX_ENVELOPE_BYTES


class Directory:
    """Announcements of one run by key.

    Args:
        meeting: the store at which participants announce themselves; it may lie.
        state: this node's own durable storage.
        run_id: announcements of other runs are not remembered.
        named: trainers and validators, asked at each look, remembered beside the `MAX_PARTICIPANTS` others.
        capacity: of those others.
    """

    def __init__(
        self,
        meeting: ObjectStore,
        state: ObjectStore,
        clock: Clock,
        run_id: bytes,
        named: Collection[bytes],
        capacity: int = limits.MAX_PARTICIPANTS,
    ) -> None:
        self._meeting = meeting
        self._state = state
        self._clock = clock
        self._run_id = run_id
        self._named = named
        self._capacity = capacity
        self._known: dict[bytes, tuple[Announcement, bytes]] | None = None
        self._loading = trio.Lock()

    async def announcement(self, key: bytes) -> Announcement | None:
        """The announcement of a key that holds now: what the meeting point shows, or what was remembered.

        Raises:
            StoreError: the meeting point does not answer, and nothing is remembered.
        """
        try:
            await self.read(paths.participant(key))
        except NotFoundError:
            pass
        except StoreError:
            if await self.recall(key) is None:
                raise
        return await self.recall(key)

    async def recall(self, key: bytes) -> Announcement | None:
        """The remembered announcement of a key; None where none holds now."""
        known = (await self._load()).get(key)
        return known[0] if known is not None and self._holds(known[0]) else None

    async def read(self, path: str) -> bytes:
        """The announcement at a path; what is no good comes as it is, for its reader to refuse.

        Raises:
            NotFoundError: there is none, and none is remembered. StoreError: no answer, and none is remembered.
        """
        key = paths.key_at_end(path)
        try:
            shown = await self._meeting.get(path, _MAX_BYTES)
        except TooLargeError:
            shown = b""
        except StoreError:
            if await self.recall(key) is None:
                raise
            return (await self._load())[key][1]
        await self._learn(key, shown)
        return (await self._load())[key][1] if await self.recall(key) is not None else shown

    async def list(self, prefix: str, after: str) -> AsyncIterator[ObjectInfo]:
        """Where announcements lie: those that the meeting point lists and those that are remembered, in order of path.

        Raises:
            StoreError: the meeting point cannot be listed, and nothing is remembered.
        """
        known = await self._load()
        found = {
            paths.participant(key): len(data)
            for key, (announcement, data) in known.items()
            if self._holds(announcement)
        }
        try:
            async for info in self._meeting.list(prefix, after=after):
                found[info.path] = info.size
                if len(found) >= 2 * limits.MAX_PARTICIPANTS:
                    break  # more than a reader takes notice of
        except StoreError:
            if not found:
                raise
        for path in sorted(found):
            if path.startswith(prefix) and path > after:
                yield ObjectInfo(path, found[path])

    def _holds(self, announcement: Announcement) -> bool:
        return announcement.expires_ms > self._clock.now() * 1000

    async def _load(self) -> dict[bytes, tuple[Announcement, bytes]]:
        if self._known is None:
            async with self._loading:
                if self._known is None:
                    self._known = await self._remembered()
        return self._known

    async def _remembered(self) -> dict[bytes, tuple[Announcement, bytes]]:
        known = {}
        async for info in self._state.list(REMEMBERED):
            data = await self._state.get(info.path, _MAX_BYTES)
            try:
                key = paths.key_at_end(info.path)
                known[key] = (self._checked(key, data), data)
            except ProtocolError:
                await self._state.delete(info.path)  # of another run, or damaged: the next one is as good
        return known

    def _checked(self, key: bytes, data: bytes) -> Announcement:
        signed = open_announced(data, Announcement)
        record = signed.record
        if signed.signers != (key,) or record.key != key or record.run != self._run_id:
            raise MalformedError("not of this key or run", "announcement")
        return record

    async def _learn(self, key: bytes, data: bytes) -> None:
        known = await self._load()
        before = known.get(key)
        if before is not None and before[1] == data:
            return
        try:
            announcement = self._checked(key, data)
        except ProtocolError:
            return
        if not self._holds(announcement) or (before and announcement.expires_ms <= before[0].expires_ms):
            return
        if before is None and key not in self._named and not await self._make_room(known):
            return
        known[key] = (announcement, data)
        await self._state.put(REMEMBERED + key.hex(), data)

    async def _make_room(self, known: dict[bytes, tuple[Announcement, bytes]]) -> bool:
        """Forget who has expired, where it is full: whether there is room."""
        if len(known.keys() - set(self._named)) < self._capacity:
            return True
        for key in [key for key, (announcement, _) in known.items() if not self._holds(announcement)]:
            del known[key]
            await self._state.delete(REMEMBERED + key.hex())
        return len(known.keys() - set(self._named)) < self._capacity
