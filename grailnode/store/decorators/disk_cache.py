"""Content-addressed objects on this machine's disk, shared by its nodes, within a limit of bytes.

    objects/DIGEST          whole objects, each put there by a rename after its digest was checked
    partial/DIGEST          a download under way: its bytes at their places, locked by the process that fetches it
    partial/DIGEST.have     one byte for each piece that has arrived

Nothing here is trusted: an object is digested whenever it is read, so the disk is never flushed for it. What was used
longest ago goes first; a file's time of modification is when it was used.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protocol.digest import content_digest

_MARKS: Final = ".have"
_SHARERS: Final = 8  # nodes that may fill one cache without looking at each other's bytes
_BLOCK: Final = 512  # bytes in which the system counts what a file takes


@dataclass(frozen=True)
class PartialDownload:
    """A download under way, held by this process: where its bytes go, and the size of a piece."""

    descriptor: int
    path: Path
    piece_bytes: int

    @property
    def _have(self) -> Path:
        return _marks(self.path)

    def arrived(self) -> set[int]:
        """The numbers of the pieces that are there.

        Raises:
            OSError: the disk does not say.
        """
        try:
            return {number for number, mark in enumerate(self._have.read_bytes()) if mark}
        except FileNotFoundError:
            return set()

    def put(self, number: int, data: bytes) -> None:
        """Keep a piece.

        Raises:
            OSError: the disk does not take it.
        """
        os.pwrite(self.descriptor, data, number * self.piece_bytes)
        marks = os.open(self._have, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(marks, b"\x01", number)
        finally:
            os.close(marks)

    def read(self, size: int) -> bytes:
        """The first `size` bytes.

        Raises:
            OSError: the disk does not give them.
        """
        pieces, place = [], 0
        while place < size and (data := os.pread(self.descriptor, size - place, place)):
            pieces.append(data)
            place += len(data)
        return b"".join(pieces)

    def discard(self) -> None:
        """Forget it: its bytes are not those of its digest."""
        for path in (self._have, self.path):
            path.unlink(missing_ok=True)

    def keep(self, target: Path) -> None:
        """Make it a whole object."""
        self.path.rename(target)
        self._have.unlink(missing_ok=True)

    def release(self) -> None:
        """Let others go on with it; where nothing has arrived, there is nothing to go on with."""
        with suppress(OSError):
            own = os.fstat(self.descriptor)
            if own.st_size == 0 and self.path.stat().st_ino == own.st_ino:
                self.discard()
        os.close(self.descriptor)


class DiskCache:
    """Objects by SHA-256; several processes may share the folder.

    Args:
        root: the folder, made if need be, readable by its owner alone.
        max_bytes: of all that lies there.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, root: Path, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._room = 0  # bytes that may come before all that lies there is looked at again
        self._objects, self._partial, self._lock = root / "objects", root / "partial", root / ".lock"
        for folder in (root, self._objects, self._partial):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def read(self, digest: bytes) -> bytes | None:
        """An object whose digest holds; None where there is none. One whose digest does not is removed.

        Raises:
            OSError: the disk does not give it.
        """
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
        """Keep a whole object whose digest was checked.

        Raises:
            OSError: the disk does not take it.
        """
        temporary = self._partial / f"{secrets.token_hex(12)}.new"
        try:
            temporary.write_bytes(data)
            temporary.rename(self._objects / digest.hex())
        finally:
            temporary.unlink(missing_ok=True)
        self.make_room(len(data))

    def finish(self, digest: bytes, partial: PartialDownload) -> None:
        """Make a download whose digest was checked a whole object.

        Raises:
            OSError: the disk does not take it.
        """
        partial.keep(self._objects / digest.hex())

    def claim(self, digest: bytes, piece_bytes: int) -> PartialDownload | None:
        """Hold an object's download, with what has arrived of it; None while another process, or task, does.

        Raises:
            OSError: the disk does not allow it.
        """
        path = self._partial / f"{digest.hex()}-{piece_bytes}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink == 1 and path.stat().st_ino == os.fstat(descriptor).st_ino:
                if os.fstat(descriptor).st_size == 0:
                    _marks(path).unlink(missing_ok=True)  # of bytes that are not there any more
                return PartialDownload(descriptor, path, piece_bytes)
        except (BlockingIOError, FileNotFoundError):
            pass  # held, or finished or discarded just now
        os.close(descriptor)
        return None

    def make_room(self, added: int) -> None:
        """Take notice of new bytes. Beyond the limit, what was used longest ago goes, a tenth of all; never a download
        under way.

        What lies there is looked at only when it may be too much: others write, too, so after an eighth of the room
        that was left.

        Raises:
            OSError: the disk does not allow it.
        """
        self._room -= added
        if self._room >= 0:
            return
        with self._locked():
            entries = sorted(self._entries())
            total = sum(size for _, size, _ in entries)
            enough = self.max_bytes if total <= self.max_bytes else self.max_bytes * 9 // 10
            for _, size, path in entries:
                if total <= enough:
                    break
                if path.parent == self._objects or _abandoned(path):
                    _marks(path).unlink(missing_ok=True)  # before the bytes that they speak of
                    path.unlink(missing_ok=True)
                    total -= size
        self._room = (self.max_bytes - total) // _SHARERS

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """Every object and download: when it was used, its bytes on the disk, its path."""
        for folder in (self._objects, self._partial):
            for path in folder.iterdir():
                if path.suffix == _MARKS and path.with_suffix("").exists():
                    continue  # they go with what they speak of
                with suppress(FileNotFoundError):
                    status = path.stat()
                    yield status.st_mtime, min(status.st_blocks * _BLOCK, status.st_size), path

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _marks(path: Path) -> Path:
    """Which pieces of a download have arrived."""
    return path.with_name(path.name + _MARKS)


def _abandoned(path: Path) -> bool:
    """Whether no living process holds a download, or what belongs to one."""
    try:
        descriptor = os.open(path.with_name(path.name.removesuffix(_MARKS)), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
