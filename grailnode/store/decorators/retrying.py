"""Try again, after growing and jittered pauses, within a deadline."""

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import trio

from grailnode.store.permanent_error import PermanentError
from roles.ports import NotFoundError, ObjectInfo, ObjectStore, StoreError, TooLargeError

T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how long.

    Attributes:
        attempts: the most tries of one operation (of one step, in a listing).
        first_pause, longest_pause: seconds; pauses double in between, each cut to a random 50 to 100 percent.
        deadline: seconds that an operation (a step, in a listing) may take, its pauses and tries included.
    """

    attempts: int = 6
    first_pause: float = 0.2
    longest_pause: float = 10.0
    deadline: float = 120.0


class RetryingStore:
    """Repeats what failed with a StoreError. An object that is missing or too large is an answer and stands.

    Args:
        store: whose operations are repeated; each of them can be, as ObjectStore defines them.
        rng: for the jitter.
        policy: how often and how long.
    """

    def __init__(self, store: ObjectStore, rng: random.Random, policy: RetryPolicy | None = None) -> None:
        self._store = store
        self._rng = rng
        self._policy = policy or RetryPolicy()

    async def put(self, path: str, data: bytes) -> None:
        """Implements ObjectStore.put."""
        await self._try(path, lambda: self._store.put(path, data))

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        """Implements ObjectStore.get."""
        return await self._try(path, lambda: self._store.get(path, max_bytes, offset=offset, size=size))

    async def delete(self, path: str) -> None:
        """Implements ObjectStore.delete."""
        await self._try(path, lambda: self._store.delete(path))

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list; a listing that broke off goes on behind the last path it gave."""
        source = self._store.list(prefix, after=after)
        reached, broken = after, False

        async def step() -> ObjectInfo | None:
            nonlocal source, broken
            if broken:
                source, broken = self._store.list(prefix, after=reached), False
            try:
                return await anext(source, None)
            except StoreError:
                broken = True  # an iterator that raised is at its end
                raise

        while (info := await self._try(prefix, step)) is not None:
            reached = max(reached, info.path)
            yield info

    async def _try(self, where: str, action: Callable[[], Awaitable[T]]) -> T:
        policy = self._policy
        failure: StoreError | None = None
        tried = 0
        with trio.move_on_after(policy.deadline):
            while tried < policy.attempts:
                if tried:
                    await trio.sleep(self._pause(tried))
                tried += 1
                try:
                    return await action()
                except (NotFoundError, TooLargeError, PermanentError):
                    raise
                except StoreError as error:
                    failure = error
        said = failure or f"{where}: no answer within {policy.deadline:g} s"
        raise StoreError(f"{said} (tried {tried} times)") from failure

    def _pause(self, tried: int) -> float:
        longest = min(self._policy.longest_pause, self._policy.first_pause * 2.0 ** (tried - 1))
        return longest * self._rng.uniform(0.5, 1.0)
