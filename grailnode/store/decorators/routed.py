"""One store out of many: each path goes to the place of its only writer, which its first part names
(docs/spec/spaces.md).
"""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from grailnode.store.decorators.space_directory import Directory
from grailnode.store.names import check_path, check_prefix, check_range
from grailnode.store.permanent_error import PermanentError
from protocol import paths
from protocol.errors import ProtocolError
from roles.ports import Clock, NotFoundError, ObjectInfo, ObjectStore, TooLargeError

SECONDS_BETWEEN_LOOKUPS = 60.0
"""How long a key's space is taken for granted before its announcement is read again."""

SECONDS_UNTIL_ANNOUNCED = 2.0
"""The same for a key that has announced nothing yet."""

_ANNOUNCED = paths.participants()


@dataclass(frozen=True)
class KnownStores:
    """The stores that a node knows by configuration.

    Attributes:
        key: this node's public key; own: where it writes.
        meeting: where participants announce themselves, the run's manifest lies and a local beacon writes.
        beacon: first part of the paths of beacon rounds.
        peers: by public key, what the operator knows better than announcements.
    """

    key: bytes
    own: ObjectStore
    meeting: ObjectStore
    beacon: str
    peers: Mapping[bytes, ObjectStore]


@dataclass(frozen=True)
class _Found:
    """Where a key's objects are, when that was looked up (seconds since the epoch), and for how many seconds it is
    good.
    """

    looked: float
    seconds: float
    url: str
    store: ObjectStore


class RoutedStore:
    """Implements ObjectStore over the spaces of all participants.

    Args:
        open_space: gives the store to read a space by, from its URL and whose it is.
    """

    def __init__(
        self,
        places: KnownStores,
        directory: Directory,
        clock: Clock,
        open_space: Callable[[str, bytes], ObjectStore],
    ) -> None:
        self._places = places
        self._directory = directory
        self._clock = clock
        self._open_space = open_space
        self._found: dict[bytes, _Found] = {}

    async def put(self, path: str, data: bytes) -> None:
        """Implements ObjectStore.put.

        Raises:
            RefusedError: another participant's path.
        """
        await self._writable(path).put(path, data)

    async def delete(self, path: str) -> None:
        """Implements ObjectStore.delete.

        Raises:
            RefusedError: another participant's path.
        """
        await self._writable(path).delete(path)

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        """Implements ObjectStore.get."""
        check_path(path)
        check_range(max_bytes, offset, size)
        if path.startswith(_ANNOUNCED):
            return _part(await self._announcement(path), path, max_bytes, offset, size)
        return await (await self._readable(path)).get(path, max_bytes, offset=offset, size=size)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list.

        Raises:
            RefusedError: the prefix names no writer: there is nobody to ask for everything.
        """
        check_prefix(prefix)
        if "/" not in prefix:
            raise PermanentError(f"{prefix}: many stores cannot be listed as one")
        if prefix.startswith(_ANNOUNCED):
            listed = self._directory.list(prefix, after)
        else:
            listed = (await self._readable(prefix)).list(prefix, after=after)
        async for info in listed:
            yield info

    async def _announcement(self, path: str) -> bytes:
        try:
            return await self._directory.read(path)
        except ProtocolError as error:
            raise NotFoundError(f"{path}: no participant has this path") from error

    def _writable(self, path: str) -> ObjectStore:
        places, first = self._places, check_path(path).partition("/")[0]
        if first == places.key.hex():
            return places.own
        if first in {"runs", "revisions", places.beacon} or path == paths.participant(places.key):
            return places.meeting
        raise PermanentError(f"{path}: another participant's, this node does not write there")

    async def _readable(self, path: str) -> ObjectStore:
        places, first = self._places, path.partition("/")[0]
        if first == places.key.hex():
            return places.own
        try:
            key = bytes.fromhex(first) if first != places.beacon else b""
        except ValueError:
            key = b""
        if len(key) != 32:
            return places.meeting
        return places.peers.get(key) or await self._space(key)

    async def _space(self, key: bytes) -> ObjectStore:
        """The store of a key's announced space; the meeting point where it announced none."""
        now, known = self._clock.now(), self._found.get(key)
        fresh = known is not None and known.looked <= now < known.looked + known.seconds
        # without a look it may still have been read since, by whoever asked who takes part
        announced = await (self._directory.recall(key) if fresh else self._directory.announcement(key))
        url = announced.space if announced is not None else ""
        if known is not None and known.url == url:
            store = known.store
        else:
            store = self._open_space(url, key) if url else self._places.meeting
        if known is None or known.store is not store or not fresh:
            seconds = SECONDS_BETWEEN_LOOKUPS if announced is not None else SECONDS_UNTIL_ANNOUNCED
            self._found[key] = _Found(now, seconds, url, store)
        return store


def _part(data: bytes, path: str, max_bytes: int, offset: int, size: int | None) -> bytes:
    part = data[offset:] if size is None else data[offset : offset + size]
    if len(part) > max_bytes:
        raise TooLargeError(f"{path}: {len(part)} bytes where at most {max_bytes} are wanted")
    return part
