"""Files that commands write: each whole or not at all, and none left behind by a command that fails."""

import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import Self

from grailnode.run import key_files
from grailnode.store.disk import sync_folder, write_through


def write_whole(file: Path, data: bytes) -> None:
    """Write beside the file, then rename over it: a reader, and who comes after a crash, finds the old one or the new
    one.

    Raises:
        OSError: it could not be written, and is as it was; names the file.
    """
    beside = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            write_through(descriptor, data)
        finally:
            os.close(descriptor)
        beside.replace(file)
        sync_folder(file.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error
    finally:
        beside.unlink(missing_ok=True)


class NewFiles:
    """The files that one command writes; a `with` that fails removes those that were not there before."""

    def __init__(self) -> None:
        self._made: list[Path] = []

    def write(self, file: Path, data: bytes) -> None:
        """Write a file, its folder too where there is none.

        Raises:
            OSError: it could not be written; names the file.
        """
        file.parent.mkdir(parents=True, exist_ok=True)
        is_new = not file.exists()
        write_whole(file, data)
        if is_new:
            self._made.append(file)

    def create_key(self, file: Path, secret: bytes | None = None) -> bytes:
        """Write a new secret (grailnode/run/key_files.py).

        Raises:
            KeyFileError: there is a file already, or it cannot be written.
        """
        secret = key_files.create(file, secret)
        self._made.append(file)
        return secret

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None:
            for file in self._made:
                file.unlink(missing_ok=True)
