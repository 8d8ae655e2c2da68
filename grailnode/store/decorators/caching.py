"""Caches content-addressed objects on this machine's disk, and resumes their downloads.

A path that ends in the SHA-256 of its object (protocol/paths.py) can only ever lead to those bytes. Such an object is
fetched in pieces, several at a time. A piece that has arrived is never fetched again, even when the process dies in
between. When several nodes of a machine need an object, one fetches it while the others wait.

Storage that lies costs a download: bytes with another digest are returned to the caller, who refuses them, and are not
cached. When the disk fails, objects are fetched without the cache.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

import trio

from grailnode.store.checks import slice_object
from grailnode.store.decorators.disk_cache import DiskCache, PartialDownload
from protocol import paths
from protocol.encoding import content_digest
from protocol.limits import MIB
from roles.gather import gather
from roles.ports import ObjectStore, StoreError

PIECE_BYTES: Final = 4 * MIB
CONCURRENT_PIECES: Final = 4

_POLL_SECONDS: Final = 0.2  # between two checks whether another node has finished a download

Progress = Callable[[str, int, int], None]
"""Called with a path, the bytes of it that have arrived, and its total bytes."""


class _InvalidDownloadError(StoreError):
    """The bytes that have arrived are not the object: it ends too soon, or pieces from the disk do not belong to it."""


@dataclass(eq=False)
class CachedStore:
    """Decorates a store with a cache of content-addressed objects, shared by all nodes of this machine."""

    store: ObjectStore
    cache: DiskCache
    progress: Progress = lambda path, arrived_bytes, total_bytes: None  # after each piece of a download of several
    _: KW_ONLY
    piece_bytes: int = PIECE_BYTES
    run_sync: Callable[..., Awaitable[Any]] = trio.to_thread.run_sync  # accesses files off the event loop's thread

    def __post_init__(self) -> None:
        self.put, self.delete, self.list = (
            self.store.put,
            self.store.delete,
            self.store.list,
        )  # none reads what it wrote

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        """Implements ObjectStore.get. A range is read from the cache or the store, but never added to the cache."""
        digest = paths.content_digest_in(path)
        if digest is None:
            return await self.store.get(path, max_bytes, offset=offset, size=size)
        try:
            cached: bytes | None = await self.run_sync(self.cache.read, digest)
        except OSError:
            cached = None
        if cached is not None:
            return slice_object(cached, path, max_bytes, offset, size)
        if offset or size is not None or max_bytes > self.cache.max_bytes // 2:
            return await self.store.get(path, max_bytes, offset=offset, size=size)
        return await self._download(path, digest, max_bytes)

    async def _download(self, path: str, digest: bytes, max_bytes: int) -> bytes:
        """Fetch an object, or wait until another task or process has fetched it."""
        while True:
            partial: PartialDownload | None = None
            try:
                # no await between the claim and the try: a claim that is not released blocks the object until this
                # process ends
                partial = await self.run_sync(self.cache.claim, digest, self.piece_bytes)
                data = await self.run_sync(self.cache.read, digest)
                if data is not None:
                    if partial is not None:
                        partial.discard()
                    return slice_object(data, path, max_bytes, 0, None)
                if partial is not None:
                    return await self._fetch(path, digest, max_bytes, partial)
            except OSError:
                return await self.store.get(path, max_bytes)
            finally:
                if partial is not None:
                    partial.release()
            await trio.sleep(_POLL_SECONDS)

    async def _fetch(self, path: str, digest: bytes, max_bytes: int, partial: PartialDownload) -> bytes:
        if max_bytes <= self.piece_bytes:
            data = await self.store.get(path, max_bytes)
        else:
            try:
                is_resumed = bool(await self.run_sync(partial.arrived_pieces))
                await self._fetch_pieces(path, max_bytes, partial)
                data = await self.run_sync(partial.read, max_bytes)
                if is_resumed and await self.run_sync(content_digest, data) != digest:
                    # the pieces from the disk may be wrong, so this does not prove that the storage lies
                    raise _InvalidDownloadError(f"{path}: pieces of an earlier download do not belong to it")
            except (OSError, _InvalidDownloadError):
                await self.run_sync(partial.discard)
                return await self.store.get(path, max_bytes)

        def store_or_discard() -> None:
            if content_digest(data) != digest:
                partial.discard()
            elif max_bytes <= self.piece_bytes:
                partial.discard()
                self.cache.write(digest, data)
            else:
                self.cache.finish(digest, partial)

        with trio.CancelScope(shield=True), suppress(OSError):
            await self.run_sync(store_or_discard)
        return data

    async def _fetch_pieces(self, path: str, total_bytes: int, partial: PartialDownload) -> None:
        count = -(-total_bytes // self.piece_bytes)
        arrived_pieces = {number for number in await self.run_sync(partial.arrived_pieces) if number < count}
        remaining_pieces = [number for number in range(count) if number not in arrived_pieces]
        self.progress(path, self._bytes_of(arrived_pieces, total_bytes), total_bytes)

        async def fetch_piece(number: int) -> None:
            start = number * self.piece_bytes
            size = min(self.piece_bytes, total_bytes - start)
            data = await self.store.get(path, size, offset=start, size=size)
            if len(data) < size:
                raise _InvalidDownloadError(f"{path}: ends before byte {start + size}")
            with trio.CancelScope(shield=True):  # a piece that has arrived is kept even when this is cancelled
                await self.run_sync(partial.put, number, data)
            await self.run_sync(self.cache.make_room, size)
            arrived_pieces.add(number)
            self.progress(path, self._bytes_of(arrived_pieces, total_bytes), total_bytes)

        await gather(
            fetch_piece, remaining_pieces, CONCURRENT_PIECES, errors=(StoreError, OSError), cancel_others=False
        )

    def _bytes_of(self, pieces: set[int], total_bytes: int) -> int:
        return sum(min(self.piece_bytes, total_bytes - number * self.piece_bytes) for number in pieces)
