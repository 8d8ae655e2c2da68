"""What was really written: a store that remembers every put, for those who judge a simulation afterwards."""

import hashlib
from dataclasses import dataclass, field

import trio

from grailnode.store.memory import MemoryStore
from roles.ports import ObjectStore


@dataclass(frozen=True)
class Put:
    """One put: when (virtual seconds), where, what."""

    moment: float
    path: str
    data: bytes


class Witness(MemoryStore):
    """A store in memory that remembers what was put into it, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: list[Put] = []

    async def put(self, path: str, data: bytes) -> None:
        """Implements ObjectStore.put."""
        await super().put(path, data)
        self.puts.append(Put(trio.current_time(), path, data))

    def under(self, prefix: str) -> list[Put]:
        """The puts whose path begins with a prefix."""
        return [put for put in self.puts if put.path.startswith(prefix)]

    def trace(self) -> bytes:
        """A digest of all puts and when they were made."""
        digest = hashlib.sha256()
        for put in self.puts:
            digest.update(f"{put.moment!r} {put.path} {len(put.data)}\n".encode() + put.data)
        return digest.digest()


@dataclass
class ReportedLines:
    """What the store told one process that it keeps: by path, when it first said so (virtual seconds)."""

    kept: dict[str, float] = field(default_factory=dict)


class HearsayStore:
    """Decorates a store as a process sees it, faults included, and notes what the process was told."""

    def __init__(self, store: ObjectStore, told: ReportedLines) -> None:
        self._store = store
        self._told = told
        self.get, self.list, self.delete = store.get, store.list, store.delete

    async def put(self, path: str, data: bytes) -> None:
        """Implements ObjectStore.put."""
        await self._store.put(path, data)
        self._told.kept.setdefault(path, trio.current_time())
