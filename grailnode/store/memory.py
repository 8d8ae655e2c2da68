"""Stores objects in this process's memory: for simulations, and as the state of nodes that keep none."""

from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Callable
from itertools import takewhile

import trio

from grailnode.store.checks import check_path, check_prefix, check_range, slice_object
from roles.ports import NotFoundError, ObjectInfo, StoreError

PAGE = 1000
"""Objects between two checkpoints of a listing: as many as S3 returns in one page."""


class MemoryStore:
    """Implements ObjectStore with a dictionary. As strict as the strictest real store: no path is another's folder."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._paths: list[str] = []  # sorted; code point order is UTF-8 order, as in S3

    def scratch(self) -> Callable[[bytes], bytes]:
        """Return what keeps bytes in memory."""
        return lambda data: data

    async def put(self, path: str, data: bytes) -> None:
        check_path(path)
        await trio.lowlevel.checkpoint()
        if path not in self._objects:
            self._refuse_folders(path)
            self._paths.insert(bisect_left(self._paths, path), path)
        self._objects[path] = bytes(data)

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        check_path(path)
        check_range(max_bytes, offset, size)
        await trio.lowlevel.checkpoint()
        data = self._objects.get(path)
        if data is None:
            raise NotFoundError(f"{path}: no such object")
        return slice_object(data, path, max_bytes, offset, size)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list; objects that are put or deleted meanwhile may or may not appear."""
        check_prefix(prefix)
        while True:
            await trio.lowlevel.checkpoint()
            start = max(bisect_right(self._paths, after), bisect_left(self._paths, prefix))
            page = takewhile(lambda path: path.startswith(prefix), self._paths[start : start + PAGE])
            matches = [ObjectInfo(path, len(self._objects[path])) for path in page]
            for info in matches:
                yield info
            if len(matches) < PAGE:
                return
            after = matches[-1].path

    async def delete(self, path: str) -> None:
        check_path(path)
        await trio.lowlevel.checkpoint()
        if self._objects.pop(path, None) is not None:
            del self._paths[bisect_left(self._paths, path)]

    def _refuse_folders(self, path: str) -> None:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            if "/".join(parts[:depth]) in self._objects:
                raise StoreError(f"{path}: {'/'.join(parts[:depth])} is an object, not a folder")
        below = bisect_left(self._paths, path + "/")
        if below < len(self._paths) and self._paths[below].startswith(path + "/"):
            raise StoreError(f"{path}: is a folder of other objects")
