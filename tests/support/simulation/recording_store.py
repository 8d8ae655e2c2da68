"""Stores that record puts, for the checks after a simulation."""

import hashlib
from dataclasses import dataclass

import trio

from grailnode.store.memory import MemoryStore
from roles.ports import ObjectStore
from tests.support.faults.decorated_store import DecoratedStore


@dataclass(frozen=True)
class Put:
    """One put: its time in virtual seconds, its path, and its bytes."""

    moment: float
    path: str
    data: bytes


class RecordingStore(MemoryStore):
    """A store in memory that records all puts in order."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: list[Put] = []

    async def put(self, path: str, data: bytes) -> None:
        await super().put(path, data)
        self.puts.append(Put(trio.current_time(), path, data))

    def under(self, prefix: str) -> list[Put]:
        """Return the puts whose path begins with a prefix."""
        return [put for put in self.puts if put.path.startswith(prefix)]

    def copy(self) -> "RecordingStore":
        """Return a store with the same objects and the same past."""
        other = RecordingStore()
        other._objects, other._paths, other.puts = dict(self._objects), list(self._paths), list(self.puts)
        return other

    def trace(self) -> bytes:
        """Return a digest of all puts and their times."""
        digest = hashlib.sha256()
        for put in self.puts:
            digest.update(f"{put.moment!r} {put.path} {len(put.data)}\n".encode() + put.data)
        return digest.digest()


class AcknowledgementRecorder(DecoratedStore):
    """Decorates the store of a process, with its faults, and records the acknowledgements to the process.

    Args:
        acknowledgements: by path, the virtual seconds of the first acknowledgement.
    """

    def __init__(self, store: ObjectStore, acknowledgements: dict[str, float]) -> None:
        super().__init__(store)
        self._acknowledgements = acknowledgements

    async def put(self, path: str, data: bytes) -> None:
        await super().put(path, data)
        self._acknowledgements.setdefault(path, trio.current_time())
