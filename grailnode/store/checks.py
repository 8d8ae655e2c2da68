"""Which paths and ranges of bytes every store accepts, and which pages of a listing it believes.

The rule for paths is the same everywhere, so that objects can move between stores. Paths come from protocol/paths.py,
never from a peer: an invalid one is a bug, a ValueError. The pages of a listing come from a service, which may repeat
keys, ignore the prefix, or never end.
"""

import re
import socket
from collections.abc import Iterable, Iterator
from typing import Final

from protocol import limits
from roles.ports import ObjectInfo, StoreError, TooLargeError

MAX_EMPTY_PAGES: Final = 8
"""Consecutive pages without a key below the prefix."""

_content_range: Final = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/(?:[0-9]{1,18}|\*)")


class PermanentError(StoreError):
    """The store will never carry out this operation; a retry cannot help."""


def check_path(path: str) -> str:
    """Return the path if it is the path of an object.

    Single slashes separate its parts. No part begins with '.', so that there is neither '.' nor '..', and no path leads
    to the local store's own files. ValueError if it is empty, absolute or too long; if a part is empty, too long or
    begins with '.'; or if a character is not printable or is a backslash.
    """
    if not is_path(path):
        raise ValueError(f"not an object path: {path[:200]!r}")
    return path


def is_path(path: str) -> bool:
    """Return whether a path is the path of an object. Listings leave out every other path."""
    if not path.isprintable() or "\\" in path or len(path.encode()) > limits.MAX_OBJECT_PATH_BYTES:
        return False
    most = limits.MAX_OBJECT_PART_BYTES
    return all(part and not part.startswith(".") and len(part.encode()) <= most for part in path.split("/"))


def check_prefix(prefix: str) -> str:
    """Return a prefix, '' or such as 'folder/', if a path can begin with it; ValueError if none can."""
    if prefix and not is_path(prefix + "x"):
        raise ValueError(f"not a prefix of object paths: {prefix!r}")
    return prefix


def check_range(max_bytes: int, offset: int, size: int | None) -> None:
    """Raise ValueError if an argument of `ObjectStore.get` is negative."""
    if max_bytes < 0 or offset < 0 or (size is not None and size < 0):
        raise ValueError(f"a range of bytes cannot be negative: {max_bytes=} {offset=} {size=}")


def slice_object(data: bytes, path: str, max_bytes: int, offset: int, size: int | None) -> bytes:
    """Return a range of a whole object, as `ObjectStore.get` would; TooLargeError if it has more than `max_bytes`."""
    end = len(data) if size is None else min(len(data), offset + size)
    if end - offset > max_bytes:
        raise TooLargeError(f"{path}: {end - offset} bytes where at most {max_bytes} are allowed")
    return data[offset:end]


def one_line(error: Exception) -> str:
    """Return an error's message, which names the endpoint and the cause, in one line of at most 300 characters."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, socket.gaierror):
            return "no host of this name is found; check the URL, or this machine's DNS"
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(error).split())[:300] or type(error).__name__


def begins_at(content_range: str, offset: int) -> bool:
    """Return whether the header Content-Range of a response says that its bytes begin at `offset`."""
    match = _content_range.fullmatch(content_range)
    return match is not None and int(match[1]) == offset


class PageCheck:
    """Reads the pages of one listing in order."""

    def __init__(self, where: str, prefix: str, after: str) -> None:
        self._where = where
        self._prefix = prefix
        self._after = after
        self._last_key = ""
        self._is_empty = True
        self._empty_pages = 0

    def objects(self, entries: Iterable[tuple[str, int]]) -> Iterator[ObjectInfo]:
        """Yield the objects of a page of keys and sizes, without keys that no `put` made; StoreError for no order."""
        self._is_empty = True
        for key, size in entries:
            if key <= self._last_key:
                raise StoreError(f"{self._where}: the listing is out of order at {key[:80]!r}")
            self._last_key = key
            if not key.startswith(self._prefix):
                continue  # the service ignores the prefix
            if key <= self._after:  # the service ignores where to begin
                self._is_empty = False
            elif is_path(key):
                self._is_empty = False
                yield ObjectInfo(key, size)

    def check_progress(self) -> None:
        """Raise StoreError after `MAX_EMPTY_PAGES` without an object; call it after each page but the last."""
        self._empty_pages = self._empty_pages + 1 if self._is_empty else 0
        if self._empty_pages > MAX_EMPTY_PAGES:
            raise StoreError(f"{self._where}: the listing announces more pages, but they have no objects")
