"""A state as it will be after a repair: nothing is written before everything that was lost has been rebuilt."""

from collections.abc import AsyncIterator

import trio

from grailnode.store.checks import slice_object
from grailnode.store.state.state_store import StateStore
from roles.ports import NotFoundError, ObjectInfo


class StateDraft:
    """Implements ObjectStore over a state without the objects that it has lost. Changes stay in memory."""

    def __init__(self, state: StateStore) -> None:
        self._state, self.scratch = state, state.scratch
        self._intact_paths: set[str] = set()
        self._lost_paths: frozenset[str] = frozenset()
        self._changes: dict[str, bytes | None] = {}  # None: deleted

    async def scan(self) -> dict[str, str]:
        """Read the state; return by path what is wrong with each object that is lost."""
        results = await self._state.scan()
        self._intact_paths = {path for path, error in results.items() if error is None}
        self._lost_paths = frozenset(results.keys() - self._intact_paths)
        return {path: error.what for path, error in results.items() if error is not None}

    def changed_paths(self) -> list[str]:
        """Return the paths of the objects that `commit` writes, in their order."""
        return sorted(path for path, data in self._changes.items() if data is not None)

    async def commit(self, last: tuple[str, ...] = ()) -> None:
        """Write the changes, and remove what was lost.

        A repair that is killed meanwhile can be started again: what was lost is removed after what replaces it. Changes
        at the prefixes in `last` come after all others, in the order in which they were made, because they are what
        shows the next repair that this one has to be done again.
        """
        first_changes = {path: data for path, data in self._changes.items() if not path.startswith(last)}
        for path, data in first_changes.items():
            if data is not None:
                await self._write(path, data)
        for path, data in first_changes.items():
            if data is None:
                await self._state.forget(path)
        for path in sorted(self._lost_paths - self._changes.keys()):
            await self._state.forget(path)
        for path, data in self._changes.items():
            if path not in first_changes:
                await (self._state.forget(path) if data is None else self._write(path, data))

    async def _write(self, path: str, data: bytes) -> None:
        if path in self._lost_paths:
            await self._state.forget(path)
        await self._state.put(path, data)

    async def put(self, path: str, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self._changes[path] = data

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        if path not in self._paths():
            raise NotFoundError(f"{path}: no such object")
        data = self._changes.get(path)
        if data is None:
            return await self._state.get(path, max_bytes, offset=offset, size=size)
        return slice_object(data, path, max_bytes, offset, size)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list. Sizes are not known and 0."""
        await trio.lowlevel.checkpoint()
        for path in sorted(self._paths()):
            if path.startswith(prefix) and path > after:
                yield ObjectInfo(path, 0)

    async def delete(self, path: str) -> None:
        await trio.lowlevel.checkpoint()
        self._changes[path] = None

    def _paths(self) -> set[str]:
        deleted = {path for path, data in self._changes.items() if data is None}
        return (self._intact_paths | self._changes.keys()) - deleted
