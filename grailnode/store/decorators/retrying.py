"""Repeats operations of a store that failed: for a limited time with exponential backoff and jitter (RetryingStore), or
until the disk of a node's own state takes them (WaitingState).
"""

import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import trio

from grailnode.store.checks import PermanentError
from roles.node.retries import Pause, WaitReporter
from roles.ports import NotFoundError, ObjectInfo, ObjectStore, StoreError, Telemetry, TooLargeError

T = TypeVar("T")

_PAUSE: Final = Pause(first=0.2, longest=10.0)
_DISK_PAUSE_SECONDS: Final = 0.5


class RepeatingStore(ABC):
    """Decorates a store: repeats operations that fail, as `_repeat` decides.

    That is safe, because ObjectStore's operations are idempotent.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def put(self, path: str, data: bytes) -> None:
        await self._repeat(path, lambda: self._store.put(path, data))

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        return await self._repeat(path, lambda: self._store.get(path, max_bytes, offset=offset, size=size))

    async def delete(self, path: str) -> None:
        await self._repeat(path, lambda: self._store.delete(path))

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list; a listing that fails continues after the last path it yielded."""
        source = self._store.list(prefix, after=after)
        last_path, needs_restart = after, False

        async def step() -> ObjectInfo | None:
            nonlocal source, needs_restart
            if needs_restart:
                source, needs_restart = self._store.list(prefix, after=last_path), False
            try:
                return await anext(source, None)
            except StoreError:
                needs_restart = True  # an iterator that has raised yields nothing more
                raise

        while (info := await self._repeat(prefix, step)) is not None:
            last_path = max(last_path, info.path)
            yield info

    @abstractmethod
    async def _repeat(self, where: str, action: Callable[[], Awaitable[T]]) -> T:
        """Do an operation, or one step of a listing, until it succeeds or is given up."""


@dataclass(frozen=True)
class RetryPolicy:
    """How often to try, and how long to wait. In a listing all of it applies to each step."""

    attempts: int = 6
    pause: Pause = _PAUSE  # between two tries; each is multiplied by a random factor of 0.5 to 1
    deadline: float = 120.0  # seconds for all tries and pauses of an operation


class RetryingStore(RepeatingStore):
    """Decorates a store: retries every operation that fails with a StoreError, for a limited time.

    NotFoundError, TooLargeError and PermanentError are final.
    """

    def __init__(self, store: ObjectStore, rng: random.Random, policy: RetryPolicy | None = None) -> None:
        super().__init__(store)
        self._rng = rng
        self._policy = policy or RetryPolicy()

    async def _repeat(self, where: str, action: Callable[[], Awaitable[T]]) -> T:
        policy = self._policy
        failure: StoreError | None = None
        tries, pause = 0, 0.0
        with trio.move_on_after(policy.deadline):
            while tries < policy.attempts:
                if tries:
                    pause = policy.pause.after(pause)
                    await trio.sleep(pause * self._rng.uniform(0.5, 1.0))
                tries += 1
                try:
                    return await action()
                except (NotFoundError, TooLargeError, PermanentError):
                    raise
                except StoreError as error:
                    failure = error
        message = failure or f"{where}: no answer within {policy.deadline:g} s"
        raise StoreError(f"{message} (tried {tries} times)") from failure


class WaitingState(RepeatingStore):
    """Decorates the store of a node's own state: an operation fails only if trying again would not help.

    A role changes its state in several steps, each of which relies on those before. If one of them could fail on a disk
    that is full, read-only or failing for a while, each role would have to know what that leaves behind. So the task
    that needs the operation waits, the other tasks go on, and the log says why.

    NotFoundError and TooLargeError are final, and so is StateError, which is no StoreError.
    """

    def __init__(self, state: ObjectStore, telemetry: Telemetry) -> None:
        super().__init__(state)
        self._reporter = WaitReporter(telemetry, "disk-failing")
        self._waiting = 0  # operations

    async def _repeat(self, where: str, action: Callable[[], Awaitable[T]]) -> T:
        waits = False
        try:
            while True:
                try:
                    return await action()
                except (NotFoundError, TooLargeError):
                    raise
                except StoreError as error:
                    self._report(error)
                self._waiting += not waits
                waits = True
                await trio.sleep(_DISK_PAUSE_SECONDS)
        finally:
            self._waiting -= waits
            if not self._waiting:
                self._reporter.over()

    def _report(self, error: StoreError) -> None:
        """Report an error. Two operations that fail for one cause differ in their paths alone."""
        cause = error.__cause__.errno if isinstance(error.__cause__, OSError) else type(error.__cause__)
        text = f"{error}; this process waits until the disk takes it"
        self._reporter.waiting("disk", text, "the disk takes what this node must not forget: free space there", cause)
