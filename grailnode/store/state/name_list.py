"""The list of the names in a node's state, so that an object which disappears is noticed (docs/guide/operate.md).

A file of lines, to which every process of the node appends: "+path" after an object was stored, "-path" before one is
deleted. The list is locked meanwhile, because one process may delete what another one has just stored. Each line begins
with a checksum. A line that is damaged, as a power failure may leave it, is ignored. So an object may be there and not
in the list, which does no harm; an object that is in the list and not there is lost.
"""

import errno
import os
import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from blake3 import blake3

from grailnode.store.disk import locked, sync_folder, write_through
from grailnode.store.state.envelope import FORM, DamageError, ForeignError

NAME: Final = ".names"
_LOCK: Final = ".names.lock"
_CHECKSUM_BYTES: Final = 4
_MIN_LINES: Final = 1000  # a shorter list is never rewritten


class NameList:
    """The list of one run's state. Several processes and threads may share it. DamageError if it cannot be used."""

    def __init__(self, root: Path, run_id: bytes) -> None:
        self._root = root
        self._path, self._lock = root / NAME, root / _LOCK
        self._title = f"grailnode state {FORM} {run_id.hex()}"
        self._first_line: bytes | None = None  # of the file as it was read; each rewriting has another
        self._names: dict[str, set[str]] = {}  # by folder
        self._lines = 0  # that were read
        self._position = 0  # in the file, up to which it was read

    def open(self, is_new: Callable[[], bool]) -> None:
        """Read the list. A new state gets one, and it is written anew when most lines are about deleted objects."""
        with locked(self._lock):
            if not os.path.lexists(self._path) and is_new():
                self._write(())
            self._refresh()
            names = [name for folder in self._names.values() for name in folder]
            if self._lines > max(_MIN_LINES, 4 * len(names)):
                self._write(names)

    def rewrite(self, names: Collection[str]) -> None:
        with locked(self._lock):
            self._write(names)

    def names(self, prefix: str = "") -> set[str]:
        with locked(self._lock):
            self._refresh()
            folders = [folder for folder in self._names if folder.startswith(prefix) or prefix.startswith(folder)]
            return {name for folder in folders for name in self._names[folder] if name.startswith(prefix)}

    def contains(self, name: str) -> bool:
        with locked(self._lock):
            self._refresh()
            return name in self._names.get(_folder(name), ())

    def add(self, name: str) -> None:
        """Add the name of an object that was stored, unless it was deleted since.

        The line is not flushed: after a power failure it may be lost.
        """
        with locked(self._lock):
            if name not in self._names.get(_folder(name), ()) and (self._root / name).is_file():
                self._append("+", name)

    @contextmanager
    def removal(self, name: str) -> Iterator[None]:
        """Remove the name of an object that the block deletes. The list is locked until the end of the block, so that
        no other process adds the name meanwhile. It is removed on the disk when the block begins.
        """
        with locked(self._lock):
            self._refresh()
            if name in self._names.get(_folder(name), ()):
                self._append("-", name, flush=True)
            yield

    def _append(self, sign: str, name: str, *, flush: bool = False) -> None:
        """Append a line. A line that a failure has cut before is ended first: the two would be one damaged line."""
        line = _line(sign + name)
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line
            if os.write(descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            if flush:
                os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        self._apply(sign + name)

    def _apply(self, entry: str) -> None:
        sign, name = entry[:1], entry[1:]
        folder = self._names.setdefault(_folder(name), set())
        if sign == "+":
            folder.add(name)
        elif sign == "-":
            folder.discard(name)

    def _refresh(self) -> None:
        """Read the lines that were appended since the last time, by whatever process."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise DamageError("missing") from None
        with os.fdopen(descriptor, "rb") as file:
            first_line = file.readline()
            if first_line != self._first_line:
                title = _parse(first_line)
                if title is None:
                    raise DamageError("damaged in its first line" if first_line else "empty")
                if title.rpartition(" ")[0] != self._title:
                    raise ForeignError("of another run, or of another version of this program")
                self._first_line, self._names, self._lines, self._position = first_line, {}, 0, len(first_line)
            file.seek(self._position)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._position += len(complete)
        for line in complete.splitlines():
            self._lines += 1
            entry = _parse(line)
            if entry is not None:
                self._apply(entry)

    def _write(self, names: Collection[str]) -> None:
        """Write the list anew, whole or not at all."""
        temporary = self._path.with_name(f"{NAME}.new")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            first_line = _line(f"{self._title} {secrets.token_hex(8)}")
            write_through(descriptor, first_line, b"".join(_line("+" + name) for name in sorted(names)))
        finally:
            os.close(descriptor)
        if self._path.is_dir():
            self._path.rmdir()
        temporary.rename(self._path)
        sync_folder(self._root)
        self._refresh()


def _folder(name: str) -> str:
    return name[: name.rfind("/") + 1]


def _line(entry: str) -> bytes:
    data = entry.encode()
    return blake3(data).digest()[:_CHECKSUM_BYTES].hex().encode() + b" " + data + b"\n"


def _parse(line: bytes) -> str | None:
    """Return the entry of a line; None for a damaged one."""
    checksum, _, data = line.rstrip(b"\n").partition(b" ")
    if checksum != blake3(data).digest()[:_CHECKSUM_BYTES].hex().encode():
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
