"""Stores objects as files below one directory of a local or mounted file system.

An object is written to a temporary file, flushed to the disk, and renamed into place; then the directory is flushed.
So an acknowledged object survives a power failure, and a reader never sees a part of one. Temporary files are in
`.tmp/` below the root, which no path leads to. Their writer locks them while it lives. Opening the store therefore
removes those whose writer died, and none of another process, in whatever container that runs.
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

from grailnode.store.checks import check_path, check_prefix, check_range, is_path
from grailnode.store.disk import (
    ScratchBytes,
    ScratchFile,
    disk_errors,
    locked_file,
    make_folder,
    sweep,
    sync_folder,
    write_through,
)
from roles.ports import NotFoundError, ObjectInfo, StoreError, TooLargeError

PAGE: Final = 1000
"""Objects that a listing reads from the disk at a time: as many as S3 returns in one page."""

_PUT_ATTEMPTS: Final = 16  # a concurrent deletion may remove the empty folder that a put is about to use

T = TypeVar("T")


class LocalStore:
    """Implements ObjectStore below a directory, which several processes may share; it is created when it is missing.
    StoreError if it cannot be created or read. At most `threads` file operations run at a time.

    Files are accessed in worker threads or, for tests on trio's MockClock, inline on the event loop: that clock does
    not notice that a thread is busy and would advance meanwhile.
    """

    def __init__(self, root: Path, *, inline: bool = False, threads: int = 8) -> None:
        self._root = root.absolute()
        self._temporary = self._root / ".tmp"
        self._inline = inline
        self._limiter = trio.CapacityLimiter(threads)
        with disk_errors(str(self._root)):
            make_folder(self._temporary)
            sweep(self._temporary)

    def scratch(self) -> Callable[[bytes], bytes | ScratchBytes]:
        """Return what keeps bytes in a file without a name on the disk of this store."""
        return ScratchFile(self._temporary).keep

    async def put(self, path: str, data: bytes) -> None:
        """Implements ObjectStore.put; the object is on the disk when this returns."""
        check_path(path)
        await self._run(lambda: self._put(path, data))

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        check_path(path)
        check_range(max_bytes, offset, size)
        return await self._run(lambda: self._get(path, max_bytes, offset, size))

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list; objects that are put or deleted meanwhile may or may not appear."""
        check_prefix(prefix)
        walk = self._walk(prefix, after)

        def next_page() -> list[ObjectInfo]:
            with disk_errors(str(self._root / prefix)):
                return [*islice(walk, PAGE)]

        while page := await self._run(next_page):
            for info in page:
                yield info

    async def delete(self, path: str) -> None:
        """Implements ObjectStore.delete; the deletion is on the disk when this returns."""
        check_path(path)
        await self._run(lambda: self._delete(path))

    async def _run(self, work: Callable[[], T]) -> T:
        if self._inline:
            await trio.lowlevel.checkpoint()
            return work()
        return await trio.to_thread.run_sync(work, limiter=self._limiter)

    def _encode(self, _path: str, data: bytes) -> tuple[bytes, ...]:
        """Return the parts of the file that holds an object, to be written one after the other."""
        return (data,)

    def _put(self, path: str, data: bytes) -> None:
        target = self._root / path
        with disk_errors(str(target)):
            for _ in range(_PUT_ATTEMPTS):
                temporary = self._temporary / secrets.token_hex(12)
                try:
                    with locked_file(temporary) as descriptor:
                        write_through(descriptor, *self._encode(path, data))
                        make_folder(target.parent)
                        temporary.rename(target)
                except FileNotFoundError:
                    continue
                finally:
                    temporary.unlink(missing_ok=True)
                with suppress(FileNotFoundError):  # a concurrent deletion removed the object and its folder
                    sync_folder(target.parent)
                return
        raise StoreError(
            f"{path}: its folder below {self._root} disappeared {_PUT_ATTEMPTS} times during the put; does another "
            "program remove folders there?"
        )

    def _get(self, path: str, max_bytes: int, offset: int, size: int | None) -> bytes:
        target = self._root / path
        with disk_errors(str(target)):
            try:
                # without O_NONBLOCK, opening a named pipe would wait for its writer
                descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise NotFoundError(f"{path}: no such object") from error
            try:
                return self._read(descriptor, path, max_bytes, offset, size)
            finally:
                os.close(descriptor)

    def _read(self, descriptor: int, path: str, max_bytes: int, offset: int, size: int | None) -> bytes:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotFoundError(f"{path}: no such object")
        remaining = max(0, status.st_size - offset)
        if size is not None:
            remaining = min(size, remaining)
        if remaining > max_bytes:
            raise TooLargeError(f"{path}: {remaining} bytes where at most {max_bytes} are allowed")
        pieces = []
        while remaining > 0 and (piece := os.pread(descriptor, remaining, offset)):
            pieces.append(piece)
            remaining -= len(piece)
            offset += len(piece)
        return b"".join(pieces)

    def _delete(self, path: str) -> None:
        target = self._root / path
        with disk_errors(str(target)):
            if not self._unlink(path):
                return
            for folder in target.parents:
                with suppress(FileNotFoundError):  # a concurrent deletion removed this folder and flushed its parent
                    sync_folder(folder)
                if folder == self._root:
                    return
                try:
                    folder.rmdir()
                except OSError:  # the folder is not empty
                    return

    def _unlink(self, path: str) -> bool:
        try:
            (self._root / path).unlink()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return False
        return True

    def _walk(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        """Yield objects in order of path. The path of a folder ends with '/', so that it sorts where its objects do."""
        pending = _children(self._root, prefix[: prefix.rfind("/") + 1])
        while pending:
            path = pending.pop()
            if path.endswith("/"):
                may_match = path.startswith(prefix) or prefix.startswith(path)
                if may_match and (path > after or after.startswith(path)):
                    pending.extend(_children(self._root, path))
            elif path.startswith(prefix) and path > after:
                try:
                    size = (self._root / path).lstat().st_size
                except FileNotFoundError:
                    continue
                yield ObjectInfo(path, size)


def _children(root: Path, folder: str) -> list[str]:
    """Return the paths in a folder in reverse order. Folders end with '/', but the root is ''."""
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
