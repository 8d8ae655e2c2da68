"""A store whose content-addressed objects are kept on this machine's disk, and whose downloads go on where they were
cut.

A path that ends in the SHA-256 of its object (protocol/paths.py) can only ever hold those bytes. Such an object is
fetched in pieces by range, several at a time; a piece that has arrived is never fetched again, whoever fails or dies in
between, and of several nodes on one machine one fetches while the others wait. Storage that lies costs a download:
bytes with another digest are handed to the caller as they came, for it to refuse, and are not kept. A disk that fails
is gone around.
"""

import functools
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Final, TypeVar

import trio

from grailnode.store.decorators.disk_cache import DiskCache, PartialDownload
from protocol import paths
from protocol.digest import content_digest
from protocol.limits import MIB
from roles.gather import gather
from roles.ports import ObjectInfo, ObjectStore, StoreError, TooLargeError

PIECE_BYTES: Final = 4 * MIB
PIECES_AT_ONCE: Final = 4

_WAIT_SECONDS: Final = 0.2  # between two looks whether another download has ended

T = TypeVar("T")
Progress = Callable[[str, int, int], None]
"""Told of a path, the bytes that have arrived of it, and how many there will be."""


class _UnfitError(StoreError):
    """What has arrived is not the object: it ends too soon, or what lay on this machine's disk is not of it."""


class CachedStore:
    """Decorates a store with a cache of what cannot change.

    Args:
        cache: shared by all that read on this machine.
        progress: told of downloads of several pieces, whenever a piece has arrived.
        inline: do the file work on the event loop, for tests on trio's MockClock.
    """

    def __init__(
        self,
        store: ObjectStore,
        cache: DiskCache,
        progress: Progress = lambda path, done, total: None,
        *,
        piece_bytes: int = PIECE_BYTES,
        inline: bool = False,
    ) -> None:
        self._store = store
        self._cache = cache
        self._progress = progress
        self._piece_bytes = piece_bytes
        self._inline = inline

    async def put(self, path: str, data: bytes) -> None:
        """Implements ObjectStore.put; what this node writes it does not read."""
        await self._store.put(path, data)

    async def delete(self, path: str) -> None:
        """Implements ObjectStore.delete."""
        await self._store.delete(path)

    def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list."""
        return self._store.list(prefix, after=after)

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        """Implements ObjectStore.get; a range is served from the cache or else from the store, and not kept."""
        digest = paths.content_digest_in(path)
        if digest is None:
            return await self._store.get(path, max_bytes, offset=offset, size=size)
        try:
            cached = await self._run(lambda: self._cache.read(digest))
        except OSError:
            cached = None
        if cached is not None:
            return _part(cached, path, max_bytes, offset, size)
        if offset or size is not None or max_bytes > self._cache.max_bytes // 2:
            return await self._store.get(path, max_bytes, offset=offset, size=size)
        return await self._download(path, digest, max_bytes)

    async def _download(self, path: str, digest: bytes, max_bytes: int) -> bytes:
        """Fetch an object, or wait for whoever is fetching it."""
        while True:
            partial: PartialDownload | None = None
            try:
                # a claim that nobody releases would stand until this process ends: no await between it and the try
                partial = await self._run(lambda: self._cache.claim(digest, self._piece_bytes))
                data = await self._run(lambda: self._cache.read(digest))
                if data is not None:
                    if partial is not None:
                        partial.discard()
                    return _part(data, path, max_bytes, 0, None)
                if partial is not None:
                    return await self._fetch(path, digest, max_bytes, partial)
            except OSError:
                return await self._store.get(path, max_bytes)
            finally:
                if partial is not None:
                    partial.release()
            await trio.sleep(_WAIT_SECONDS)

    async def _fetch(self, path: str, digest: bytes, max_bytes: int, partial: PartialDownload) -> bytes:
        if max_bytes <= self._piece_bytes:
            data = await self._store.get(path, max_bytes)
        else:
            try:
                resumed = bool(await self._run(partial.arrived))
                await self._fetch_pieces(path, max_bytes, partial)
                data = await self._run(lambda: partial.read(max_bytes))
                if resumed and await self._run(lambda: content_digest(data)) != digest:
                    raise _UnfitError(
                        f"{path}: what lay on this machine's disk is not of it"
                    )  # the storage need not lie
            except (OSError, _UnfitError):
                await self._run(partial.discard)
                return await self._store.get(path, max_bytes)  # not what it should be, or no room: let the caller see

        def settle() -> None:
            if content_digest(data) != digest:
                partial.discard()
            elif max_bytes <= self._piece_bytes:
                partial.discard()
                self._cache.write(digest, data)
            else:
                self._cache.finish(digest, partial)

        with trio.CancelScope(shield=True), suppress(OSError):
            await self._run(settle)
        return data

    async def _fetch_pieces(self, path: str, total: int, partial: PartialDownload) -> None:
        """Fetch the pieces that are missing.

        Raises:
            StoreError: one could not be had; those that arrived stay.
            OSError: the disk does not take them.
        """
        count = -(-total // self._piece_bytes)
        arrived = {number for number in await self._run(partial.arrived) if number < count}
        missing = [number for number in range(count) if number not in arrived]
        self._progress(path, self._bytes_of(arrived, total), total)

        async def fetch_piece(number: int) -> None:
            start = number * self._piece_bytes
            size = min(self._piece_bytes, total - start)
            data = await self._store.get(path, size, offset=start, size=size)
            if len(data) < size:
                raise _UnfitError(f"{path}: ends before byte {start + size}")
            with trio.CancelScope(shield=True):  # what has arrived is kept, whoever stops waiting for it
                await self._run(functools.partial(partial.put, number, data))
            await self._run(functools.partial(self._cache.make_room, size))
            arrived.add(number)
            self._progress(path, self._bytes_of(arrived, total), total)

        await gather(fetch_piece, missing, PIECES_AT_ONCE, errors=(StoreError, OSError), cancel_others=False)

    def _bytes_of(self, pieces: set[int], total: int) -> int:
        return sum(min(self._piece_bytes, total - number * self._piece_bytes) for number in pieces)

    async def _run(self, work: Callable[[], T]) -> T:
        if self._inline:
            await trio.lowlevel.checkpoint()
            return work()
        return await trio.to_thread.run_sync(work)


def _part(data: bytes, path: str, max_bytes: int, offset: int, size: int | None) -> bytes:
    part = data[offset:] if size is None else data[offset : offset + size]
    if len(part) > max_bytes:
        raise TooLargeError(f"{path}: {len(part)} bytes where at most {max_bytes} are wanted")
    return part
