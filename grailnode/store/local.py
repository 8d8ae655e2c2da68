"""Objects as files below one directory of a local (or locally mounted) file system.

An object is written to a temporary file, flushed to the disk, and renamed into place; then the directory is flushed,
so an acknowledged object outlives a power cut and a reader never sees half of one. Temporary files lie in `.tmp/`
below the root, where no path can reach. Their writer holds a lock on them for as long as it lives, so that opening
the store sweeps those whose writer died and touches those of no other process, whatever container it runs in.
"""

import os
import secrets
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

import trio

from grailnode.store.disk import disk_errors, locked_file, make_folder, sweep, sync_folder, write_through
from grailnode.store.names import check_path, check_prefix, check_range, is_path
from roles.ports import NotFoundError, ObjectInfo, StoreError, TooLargeError

PAGE: Final = 1000
"""Objects of one visit to the disk while listing, as S3 answers."""

_PUT_ATTEMPTS: Final = 16  # a deletion may take away the empty folder that a put is about to use

T = TypeVar("T")


class LocalStore:
    """Objects below `root`, which is made if need be; several processes may share it.

    Args:
        root: the directory.
        inline: do the file work on the event loop instead of in worker threads. For tests on trio's MockClock, which
            cannot see that a thread is at work and would run ahead of it.
        threads: file operations at a time.

    Raises:
        StoreError: the directory cannot be made or read.
    """

    def __init__(self, root: Path, *, inline: bool = False, threads: int = 8) -> None:
        self._root = root.absolute()
        self._temporary = self._root / ".tmp"
        self._inline = inline
        self._limiter = trio.CapacityLimiter(threads)
        with disk_errors(str(self._root)):
            make_folder(self._temporary)
            sweep(self._temporary)

    async def put(self, path: str, data: bytes) -> None:
        """Implements ObjectStore.put; when it returns, the disk holds the object."""
        check_path(path)
        await self._run(lambda: self._put(path, data))

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        """Implements ObjectStore.get."""
        check_path(path)
        check_range(max_bytes, offset, size)
        return await self._run(lambda: self._get(path, max_bytes, offset, size))

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list; objects that come or go meanwhile may or may not appear."""
        check_prefix(prefix)
        walk = self._walk(prefix, after)

        def next_page() -> list[ObjectInfo]:
            with disk_errors(str(self._root / prefix)):
                return [*islice(walk, PAGE)]

        while page := await self._run(next_page):
            for info in page:
                yield info

    async def delete(self, path: str) -> None:
        """Implements ObjectStore.delete; when it returns, the disk has forgotten the object."""
        check_path(path)
        await self._run(lambda: self._delete(path))

    async def _run(self, work: Callable[[], T]) -> T:
        if self._inline:
            await trio.lowlevel.checkpoint()
            return work()
        return await trio.to_thread.run_sync(work, limiter=self._limiter)

    def _put(self, path: str, data: bytes) -> None:
        target = self._root / path
        with disk_errors(str(target)):
            for _ in range(_PUT_ATTEMPTS):
                temporary = self._temporary / secrets.token_hex(12)
                try:
                    with locked_file(temporary) as descriptor:
                        write_through(descriptor, data)
                        make_folder(target.parent)
                        temporary.rename(target)
                    sync_folder(target.parent)
                except FileNotFoundError:
                    continue
                finally:
                    temporary.unlink(missing_ok=True)
                return
        raise StoreError(f"{path}: its folder below {self._root} vanishes as often as it is made")

    def _get(self, path: str, max_bytes: int, offset: int, size: int | None) -> bytes:
        target = self._root / path
        with disk_errors(str(target)):
            try:
                # without O_NONBLOCK, opening a named pipe that somebody left here would wait for its writer
                descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise NotFoundError(f"{path}: no such object") from error
            try:
                return _read(descriptor, path, max_bytes, offset, size)
            finally:
                os.close(descriptor)

    def _delete(self, path: str) -> None:
        target = self._root / path
        with disk_errors(str(target)):
            try:
                target.unlink()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return
            for folder in target.parents:
                with suppress(FileNotFoundError):  # another deletion was faster, and flushed what is above
                    sync_folder(folder)
                if folder == self._root:
                    return
                try:
                    folder.rmdir()
                except OSError:  # other objects lie there
                    return

    def _walk(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        """Objects in order of path. A folder's path ends with '/', so it sorts where its objects do."""
        pending = _children(self._root, prefix[: prefix.rfind("/") + 1])
        while pending:
            path = pending.pop()
            if path.endswith("/"):
                leads_there = path.startswith(prefix) or prefix.startswith(path)
                if leads_there and (path > after or after.startswith(path)):
                    pending.extend(_children(self._root, path))
            elif path.startswith(prefix) and path > after:
                try:
                    size = (self._root / path).lstat().st_size
                except FileNotFoundError:
                    continue
                yield ObjectInfo(path, size)


def _children(root: Path, folder: str) -> list[str]:
    """What lies in a folder ('' is the root, the others end with '/'), last one first."""
    try:
        with os.scandir(root / folder) as entries:
            paths = [
                folder + entry.name + ("/" if entry.is_dir(follow_symlinks=False) else "")
                for entry in entries
                if is_path(folder + entry.name)
                and (entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False))
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(paths, reverse=True)


def _read(descriptor: int, path: str, max_bytes: int, offset: int, size: int | None) -> bytes:
    """The range of an open file, if it is one and the range is not too large."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise NotFoundError(f"{path}: no such object")
    wanted = max(0, status.st_size - offset)
    if size is not None:
        wanted = min(size, wanted)
    if wanted > max_bytes:
        raise TooLargeError(f"{path}: {wanted} bytes where at most {max_bytes} are wanted")
    pieces = []
    while wanted > 0 and (piece := os.pread(descriptor, wanted, offset)):
        pieces.append(piece)
        wanted -= len(piece)
        offset += len(piece)
    return b"".join(pieces)
