"""Checks the pages of an S3 listing, whose service may repeat keys, ignore the prefix, or never end."""

from collections.abc import Iterable, Iterator
from typing import Final

from grailnode.store.names import is_path
from roles.ports import ObjectInfo, StoreError

MAX_EMPTY_PAGES: Final = 8
"""Consecutive pages without a key below the prefix."""


class PageCheck:
    """Reads the pages of one listing in order.

    Args:
        where: what is listed, for messages.
        prefix, after: the arguments of `ObjectStore.list`.
    """

    def __init__(self, where: str, prefix: str, after: str) -> None:
        self._where = where
        self._prefix = prefix
        self._after = after
        self._last_key = ""
        self._is_empty = True
        self._empty_pages = 0

    def objects(self, entries: Iterable[tuple[str, int]]) -> Iterator[ObjectInfo]:
        """Yield the objects of a page. Keys that no `put` could have created are left out.

        Args:
            entries: key and size in bytes.

        Raises:
            StoreError: the keys are not in ascending order.
        """
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
        """Check that a next page is worth a request; call it after each page that another one follows.

        Raises:
            StoreError: `MAX_EMPTY_PAGES` and one more had nothing below the prefix.
        """
        self._empty_pages = self._empty_pages + 1 if self._is_empty else 0
        if self._empty_pages > MAX_EMPTY_PAGES:
            raise StoreError(f"{self._where}: the listing announces more pages, but they have no objects")
