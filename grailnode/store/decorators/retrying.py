"""Retries operations of a store with exponential backoff and jitter, within a deadline."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import trio

from grailnode.store.decorators.repeating import RepeatingStore
from grailnode.store.permanent_error import PermanentError
from roles.node.retries import Pause
from roles.ports import NotFoundError, ObjectStore, StoreError, TooLargeError

T = TypeVar("T")

_PAUSE: Final = Pause(first=0.2, longest=10.0)


@dataclass(frozen=True)
class RetryPolicy:
    """How often to try, and how long to wait. In a listing all of it applies to each step.

    Attributes:
        attempts: the most tries of one operation.
        pause: between two tries; each is multiplied by a random factor of 0.5 to 1.
        deadline: seconds for all tries and pauses of an operation.
    """

    attempts: int = 6
    pause: Pause = _PAUSE
    deadline: float = 120.0


class RetryingStore(RepeatingStore):
    """Decorates a store: retries every operation that fails with a StoreError, for a limited time.

    NotFoundError, TooLargeError and PermanentError are final.

    Args:
        rng: for the jitter.
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
