"""Caches content-addressed objects on this machine's disk, and resumes their downloads.

A path that ends in the SHA-256 of its object (protocol/paths.py) can only ever lead to those bytes. Such an object is
fetched in pieces, several at a time. A piece that has arrived is never fetched again, even when the process dies in
between. When several nodes of a machine need an object, one fetches it while the others wait.

Storage that lies costs a download: bytes with another digest are returned to the caller, who refuses them, and are not
cached. When the disk fails, objects are fetched without the cache.

    objects/DIGEST                     a whole object, renamed into place after its digest was checked
    partial/DIGEST-PIECE_BYTES         a download under way, with pieces at their places; its process has locked it
    partial/DIGEST-PIECE_BYTES.marks   one byte for each piece that has arrived

The cache does not trust the disk: it checks an object's digest whenever it reads it, so nothing is flushed. Beyond the
limit it removes the least recently used objects; a file's modification time says when it was used.
"""

import errno
import fcntl
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Final

import trio

from grailnode.store.checks import slice_object
from grailnode.store.disk import locked
from protocol import paths
from protocol.encoding import content_digest
from protocol.limits import MIB
from roles.gather import gather
from roles.ports import ObjectStore, StoreError

_MARKS_SUFFIX: Final = ".marks"
_MAX_NODES: Final = 8  # that may fill one cache without reading each other's changes
_BLOCK_BYTES: Final = 512  # the unit of `st_blocks`


@dataclass(frozen=True)
class PartialDownload:
    """A download under way, locked by this process."""

    descriptor: int  # of the open file with the pieces
    path: Path
    piece_bytes: int  # bytes of a piece; the last one may be shorter

    @property
    def _marks(self) -> Path:
        return _marks_of(self.path)

    def arrived_pieces(self) -> set[int]:
        try:
            return {number for number, mark in enumerate(self._marks.read_bytes()) if mark}
        except FileNotFoundError:
            return set()

    def put(self, number: int, data: bytes) -> None:
        if os.pwrite(self.descriptor, data, number * self.piece_bytes) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        marks = os.open(self._marks, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(marks, b"\x01", number)
        finally:
            os.close(marks)

    def read(self, size: int) -> bytes:
        pieces, place = [], 0
        while place < size and (data := os.pread(self.descriptor, size - place, place)):
            pieces.append(data)
            place += len(data)
        return b"".join(pieces)

    def discard(self) -> None:
        for path in (self._marks, self.path):
            path.unlink(missing_ok=True)

    def release(self) -> None:
        """Unlock the download, so that others can resume it. An empty one is removed."""
        with suppress(OSError):
            status = os.fstat(self.descriptor)
            if status.st_size == 0 and self.path.stat().st_ino == status.st_ino:
                self.discard()
        os.close(self.descriptor)


class DiskCache:
    """Objects by their SHA-256, at most `max_bytes` in all. Several processes may share the folder, which is readable
    by its owner only, and created when it is missing.
    """

    def __init__(self, root: Path, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._unchecked_bytes = 0  # bytes that this node may still add before it measures the cache again
        self._objects, self._partial, self._lock = root / "objects", root / "partial", root / ".lock"
        for folder in (root, self._objects, self._partial):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def read(self, digest: bytes) -> bytes | None:
        """Return an object; None when it is not cached. A file with another digest is removed."""
        path = self._objects / digest.hex()
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if content_digest(data) != digest:
            path.unlink(missing_ok=True)
            return None
        with suppress(FileNotFoundError):
            os.utime(path)
        return data

    def write(self, digest: bytes, data: bytes) -> None:
        """Add a whole object, whose digest the caller has checked."""
        temporary = self._partial / f"{secrets.token_hex(12)}.new"
        try:
            temporary.write_bytes(data)
            temporary.rename(self._objects / digest.hex())
        finally:
            temporary.unlink(missing_ok=True)
        self.make_room(len(data))

    def finish(self, digest: bytes, partial: PartialDownload) -> None:
        """Turn a download, whose digest the caller has checked, into a cached object."""
        partial.path.rename(self._objects / digest.hex())
        _marks_of(partial.path).unlink(missing_ok=True)

    def claim(self, digest: bytes, piece_bytes: int) -> PartialDownload | None:
        """Lock a download and return it, with the pieces that have arrived; None while another task has it."""
        path = self._partial / f"{digest.hex()}-{piece_bytes}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink == 1 and path.stat().st_ino == os.fstat(descriptor).st_ino:
                if os.fstat(descriptor).st_size == 0:
                    _marks_of(path).unlink(missing_ok=True)  # the pieces that they mark are gone
                return PartialDownload(descriptor, path, piece_bytes)
        except (BlockingIOError, FileNotFoundError):
            pass  # another process has locked it, or has just finished or discarded it
        os.close(descriptor)
        return None

    def make_room(self, added_bytes: int) -> None:
        """Account for new bytes; when the cache may exceed its limit, remove the least recently used tenth.

        Downloads under way are never removed. Measuring the cache reads all its entries, so it happens only after this
        node has added an eighth of the room that there was: other nodes add to the cache as well.
        """
        self._unchecked_bytes -= added_bytes
        if self._unchecked_bytes >= 0:
            return
        with locked(self._lock):
            entries = sorted(self._entries())
            total = sum(size for _, size, _ in entries)
            target = self.max_bytes if total <= self.max_bytes else self.max_bytes * 9 // 10
            for _, size, path in entries:
                if total <= target:
                    break
                if path.parent == self._objects or _is_abandoned(path):
                    _marks_of(path).unlink(missing_ok=True)  # before the pieces that they mark
                    path.unlink(missing_ok=True)
                    total -= size
        self._unchecked_bytes = (self.max_bytes - total) // _MAX_NODES

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """Yield every object and download: when it was last used, its bytes on the disk, its path."""
        for folder in (self._objects, self._partial):
            for path in folder.iterdir():
                if path.suffix == _MARKS_SUFFIX and path.with_suffix("").exists():
                    continue  # removed with its pieces
                with suppress(FileNotFoundError):
                    status = path.stat()
                    yield status.st_mtime, min(status.st_blocks * _BLOCK_BYTES, status.st_size), path


def _marks_of(path: Path) -> Path:
    return path.with_name(path.name + _MARKS_SUFFIX)


def _is_abandoned(path: Path) -> bool:
    """Return whether no living process has locked a download; `path` is that of its pieces or of its marks."""
    try:
        descriptor = os.open(path.with_name(path.name.removesuffix(_MARKS_SUFFIX)), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


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
