"""Stores that pass everything on, but for what differs in a test: time, refusals, and counts."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

import trio

from grailnode.store.memory import MemoryStore
from protocol import paths
from roles.ports import ObjectInfo, ObjectStore, StoreError


class DecoratedStore:
    """Passes every operation on to a store. Subclasses override what differs."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner

    async def before(self, operation: str, path: str) -> None:
        """Do nothing before an operation ('put', 'get', 'list' or 'delete'). Subclasses may wait, or refuse it."""

    async def put(self, path: str, data: bytes) -> None:
        await self.before("put", path)
        await self.inner.put(path, data)

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        await self.before("get", path)
        return await self.inner.get(path, max_bytes, offset=offset, size=size)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        await self.before("list", prefix)
        async for info in self.inner.list(prefix, after=after):
            yield info

    async def delete(self, path: str) -> None:
        await self.before("delete", path)
        await self.inner.delete(path)


class UnreachableStore(DecoratedStore):
    """A store in which operations on objects below some prefixes fail while it is away.

    Args:
        operations: those that fail.
        seconds: until one fails.
        is_away: whether it is away from the beginning.

    Attributes:
        paths: of all operations so far.
        refusals: how many operations have failed.
    """

    def __init__(
        self,
        inner: ObjectStore,
        *prefixes: str,
        operations: Sequence[str] = ("get",),
        seconds: float = 1.0,
        is_away: bool = True,
    ) -> None:
        super().__init__(inner)
        self.prefixes = prefixes
        self.operations = operations
        self.seconds = seconds
        self.is_away = is_away
        self.paths: list[str] = []
        self.refusals = 0

    async def before(self, operation: str, path: str) -> None:
        self.paths.append(path)
        if self.is_away and operation in self.operations and path.startswith(self.prefixes):
            self.refusals += 1
            await trio.sleep(self.seconds)
            raise StoreError(f"{path}: connection refused")


class Link(DecoratedStore):
    """A store over a slow link, which may be cut, and which counts the bytes of objects that never change.

    Attributes:
        seconds: what each read of such an object takes.
        cut_after: so many of these bytes after which reads fail; None for never.
        sent_bytes: by path.
    """

    def __init__(self, inner: ObjectStore, seconds: float = 0.0) -> None:
        super().__init__(inner)
        self.seconds = seconds
        self.cut_after: int | None = None
        self.sent_bytes: Counter[str] = Counter()

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        is_final = paths.content_digest_in(path) is not None
        if is_final and self.cut_after is not None and self.sent_bytes.total() >= self.cut_after:
            raise StoreError(f"{path}: connection reset")
        data = await self.inner.get(path, max_bytes, offset=offset, size=size)
        if is_final:
            self.sent_bytes[path] += len(data)
            await trio.sleep(self.seconds)
        return data


class SlowStore(MemoryStore):
    """A store in memory that takes time, refuses some reads, and counts them.

    Args:
        get_seconds, put_seconds: what each read and each put takes.
        kind: the part of a path that tells the objects of which reads take time; by default all do.

    Attributes:
        silent_prefixes: below which reads are refused.
        reads: how many there were.
    """

    def __init__(self, get_seconds: float = 0.0, put_seconds: float = 0.0, kind: str = "") -> None:
        super().__init__()
        self.get_seconds, self.put_seconds, self.kind = get_seconds, put_seconds, kind
        self.silent_prefixes: tuple[str, ...] = ()
        self.reads = 0

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        self.reads += 1
        if self.kind in path:
            await trio.sleep(self.get_seconds)
        if path.startswith(self.silent_prefixes):
            raise StoreError(f"{path}: connection refused")
        return await super().get(path, max_bytes, offset=offset, size=size)

    async def put(self, path: str, data: bytes) -> None:
        await trio.sleep(self.put_seconds)
        await super().put(path, data)


class HangingStore(SlowStore):
    """Storage that fails for some paths after `seconds`, and counts the reads that it keeps waiting."""

    def __init__(self, seconds: float = 3600.0) -> None:
        super().__init__()
        self.seconds, self.waiting = seconds, 0
        self.hangs: Callable[[str], bool] = lambda path: False

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if self.hangs(path):
            self.waiting += 1
            try:
                await trio.sleep(self.seconds)
            finally:
                self.waiting -= 1
            raise StoreError(f"{path}: no answer")
        return await super().get(path, max_bytes, offset=offset, size=size)
