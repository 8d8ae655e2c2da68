"""Writes files durably, and translates errors of the disk into one line that says what to do."""

import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import IO, Final

from roles.ports import StoreError

_advice: Final = {
    errno.ENOSPC: "no space left on the disk: free some, or move the store",
    errno.EDQUOT: "the disk quota is used up: raise it, or move the store",
    errno.EIO: "the disk reports an input/output error: check its health",
    errno.EROFS: "the file system is read-only: mount it for writing",
    errno.EACCES: "permission denied: check the owner and mode of the store's directory",
    errno.EPERM: "operation not permitted: check the owner and mode of the store's directory",
    errno.EMFILE: "too many open files in this process: raise its limit (ulimit -n)",
    errno.ENFILE: "too many open files on this machine: raise fs.file-max",
    errno.EISDIR: "is a folder of other objects",
    errno.ENOTEMPTY: "is a folder of other objects",
    errno.ENOTDIR: "a part of this path is an object, not a folder",
    errno.EEXIST: "a part of this path is an object, not a folder",
    errno.ELOOP: "is a symbolic link, which this store does not follow",
}


@contextmanager
def disk_errors(where: str) -> Iterator[None]:
    """Turn an OSError of the block into a StoreError that says what to do."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{where}: {advice(error)}") from error


def advice(error: OSError) -> str:
    """Return what is wrong with the disk, and what to do."""
    return _advice.get(error.errno or 0, error.strerror or type(error).__name__)


@contextmanager
def locked_file(path: Path) -> Iterator[int]:
    """Create a file, lock it and yield its descriptor. `sweep` spares it until the block ends or this process dies."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is made if it is missing, against all threads and processes."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # NFS locks only what may be written
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # a read-only disk can be read
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class ScratchFile:
    """Bytes of this process in one file of a folder. It has no name, and is gone when nobody refers to it any more."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None  # from the first bytes on
        self._size, self._lock = 0, Lock()

    def keep(self, data: bytes) -> "bytes | ScratchBytes":
        """Write bytes behind the others. They stay in memory if the disk refuses. Threads may call this together."""
        try:
            with self._lock:
                self._file = self._file or tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
                begin, self._size = self._size, self._size + len(data)
            remaining = memoryview(data)
            while remaining:
                written = len(data) - len(remaining)
                remaining = remaining[os.pwrite(self._file.fileno(), remaining, begin + written) :]
        except OSError:
            return data
        return ScratchBytes(str(self._folder), self._file, begin, len(data))


@dataclass(frozen=True)
class ScratchBytes:
    """Some bytes of a scratch file, which are read when they are taken; StoreError if they cannot be."""

    where: str
    file: IO[bytes]
    begin: int
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: slice) -> bytes:
        begin, end, _ = place.indices(self.size)
        pieces = []
        with disk_errors(self.where):
            while begin < end and (piece := os.pread(self.file.fileno(), end - begin, self.begin + begin)):
                pieces.append(piece)
                begin += len(piece)
        return b"".join(pieces)


def write_through(descriptor: int, *parts: bytes) -> None:
    """Write the parts one after the other, and flush them to the disk."""
    for part in parts:
        remaining = memoryview(part)
        while remaining:
            remaining = remaining[os.write(descriptor, remaining) :]
    os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents durably. Does nothing when the folder exists."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        # Another process may have created the folder since `is_dir`, and may have removed it again since `mkdir`.
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise
    sync_folder(folder.parent)


def sweep(folder: Path) -> int:
    """Remove the files of `folder` that no living process has locked, and return their number."""
    removed = 0
    for path in folder.iterdir():
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed += 1
        except BlockingIOError:
            pass  # its writer is alive
        finally:
            os.close(descriptor)
    return removed
