"""Routes each path to the store of its only writer, whom the first part of the path names (docs/spec/spaces.md)."""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from grailnode.store.checks import PermanentError, check_path, check_prefix, check_range, slice_object
from grailnode.store.decorators.space_directory import SpaceDirectory
from protocol import paths
from protocol.errors import ProtocolError
from roles.ports import Clock, NotFoundError, ObjectInfo, ObjectStore

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
        url = announcement.space if announcement is not None else ""
        if space is not None and space.url == url:
            store = space.store
        else:
            store = self.open_space(url, key) if url else self.stores.meeting
        if space is None or space.store is not store or not is_fresh:
            is_announced = announcement is not None
            seconds = SECONDS_BETWEEN_LOOKUPS if is_announced else SECONDS_BETWEEN_LOOKUPS_UNTIL_ANNOUNCED
            self._spaces[key] = _Space(now, seconds, url, store)
        return store
