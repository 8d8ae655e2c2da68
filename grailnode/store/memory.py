"""Objects in this process's memory: for simulations, where thousands of hours pass in seconds."""

from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator

import trio

from grailnode.store.names import check_path, check_prefix, check_range
from roles.ports import NotFoundError, ObjectInfo, StoreError, TooLargeError

PAGE = 1000
"""Paths between two checkpoints of a listing, as S3 answers."""


class MemoryStore:
    """A dictionary that behaves as the strictest of the real stores: no path is another's folder."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._paths: list[str] = []  # sorted; code point order is UTF-8 order, as in S3

    async def put(self, path: str, data: bytes) -> None:
        """Implements ObjectStore.put."""
        check_path(path)
        await trio.lowlevel.checkpoint()
        if path not in self._objects:
            self._refuse_folders(path)
            self._paths.insert(bisect_left(self._paths, path), path)
        self._objects[path] = bytes(data)

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        """Implements ObjectStore.get."""
        check_path(path)
        check_range(max_bytes, offset, size)
        await trio.lowlevel.checkpoint()
        data = self._objects.get(path)
        if data is None:
            raise NotFoundError(f"{path}: no such object")
        end = len(data) if size is None else min(len(data), offset + size)
        if end - offset > max_bytes:
            raise TooLargeError(f"{path}: {end - offset} bytes where at most {max_bytes} are wanted")
        return data[offset:end]

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list; objects that come or go meanwhile may or may not appear."""
        check_prefix(prefix)
        while True:
            await trio.lowlevel.checkpoint()
            start = max(bisect_right(self._paths, after), bisect_left(self._paths, prefix))
            page = self._paths[start : start + PAGE]
            found = [ObjectInfo(path, len(self._objects[path])) for path in page if path.startswith(prefix)]
            for info in found:
                yield info
            if len(found) < PAGE:
                return
            after = found[-1].path

    async def delete(self, path: str) -> None:
        """Implements ObjectStore.delete."""
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
