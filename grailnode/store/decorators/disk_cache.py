"""Content-addressed objects on this machine's disk, shared by its nodes, with a limit on their bytes.

    objects/DIGEST                     a whole object, renamed into place after its digest was checked
    partial/DIGEST-PIECE_BYTES         a download under way, with pieces at their places; its process has locked it
    partial/DIGEST-PIECE_BYTES.marks   one byte for each piece that has arrived

The cache does not trust the disk: it checks an object's digest whenever it reads it, so nothing is flushed. Beyond the
limit it removes the least recently used objects; a file's modification time says when it was used.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from grailnode.store.disk import locked
from protocol.encoding import content_digest

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
        os.pwrite(self.descriptor, data, number * self.piece_bytes)
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
