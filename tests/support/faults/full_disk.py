"""A node's disk that is full for a while: it can be read, and takes nothing."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from roles.ports import Clock, ObjectStore, StoreError
from tests.support.faults.decorated_store import DecoratedStore


@dataclass(frozen=True)
class DiskFill:
    """A node's disk is full from the n-th write of one process on, for some seconds.

    Attributes:
        process: of the node; write: how many puts and deletes of this process happen before, since its first start.
    """

    process: str
    write: int
    seconds: float


@dataclass
class NodeDisk:
    """The disk that the processes of a node share.

    Attributes:
        full_until: time at which there is space again, in seconds since the Unix epoch.
        refusals: operations that it has refused.
    """

    clock: Clock
    full_until: float = 0.0
    refusals: int = 0

    def check(self, path: str) -> None:
        """Refuse a write while the disk is full.

        Raises:
            StoreError: it is full.
        """
        if self.clock.now() < self.full_until:
            self.refusals += 1
            raise StoreError(f"{path}: no space left on the disk") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class DiskStore(DecoratedStore):
    """Decorates the state of a node's process with the node's disk. Deletions take space too: docs/guide/operate.md.

    Attributes:
        fills: those of this process that are still to come, in order.
        writes: (operation, path) of all writes that were not refused.
    """

    def __init__(self, store: ObjectStore, disk: NodeDisk, fills: list[DiskFill] | None = None) -> None:
        super().__init__(store)
        self.disk = disk
        self.fills = fills or []
        self.writes: list[tuple[str, str]] = []

    async def before(self, operation: str, path: str) -> None:
        if operation not in ("put", "delete"):
            return
        while self.fills and self.fills[0].write <= len(self.writes):
            self.disk.full_until = self.disk.clock.now() + self.fills.pop(0).seconds
        self.disk.check(path)
        self.writes.append((operation, path))


@contextmanager
def free_space(size: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
