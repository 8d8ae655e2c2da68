"""Files that commands write: each is written whole or not at all, and a command that fails leaves none behind."""

import os
import secrets
from pathlib import Path
from typing import Self

from grailnode.run import key_files
from grailnode.store.disk import sync_folder, write_through
from protocol.encoding import content_digest


def write_whole(file: Path, data: bytes) -> None:
    """Replace a file atomically: a reader sees the old content or the new one, after a crash or an OSError, too."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            write_through(descriptor, data)
        finally:
            os.close(descriptor)
        temporary.replace(file)
        sync_folder(file.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error
    finally:
        temporary.unlink(missing_ok=True)


def is_object(file: Path, digest: bytes, size: int) -> bool:
    """Return whether a file has the SHA-256 and the size that a record names."""
    return file.is_file() and file.stat().st_size == size and content_digest(file.read_bytes()) == digest


class NewFiles:
    """The files that one command writes; a `with` block that fails removes those that did not exist before."""

    def __init__(self) -> None:
        self._new_files: list[Path] = []

    def write(self, file: Path, data: bytes) -> None:
        """Write a file, and create its directory where it is missing."""
        file.parent.mkdir(parents=True, exist_ok=True)
        is_new = not file.exists()
        write_whole(file, data)
        if is_new:
            self._new_files.append(file)

    def create_key(self, file: Path, secret: bytes | None = None) -> bytes:
        secret = key_files.create(file, secret)
        self._new_files.append(file)
        return secret

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            for file in self._new_files:
                file.unlink(missing_ok=True)
