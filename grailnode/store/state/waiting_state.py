"""A node's own state on a disk that may be full, read-only or failing for a while: the node waits, and loses nothing.

A role changes its state in several steps, each of which relies on those before. If one of them could fail, each role
would have to know what a failure in the middle of them leaves behind. So an operation that the disk refuses is repeated
until the disk takes it. Meanwhile the task that needs it waits, the other tasks go on, and the log says why.
"""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import trio

from grailnode.store.decorators.retrying import RepeatingStore
from roles.ports import NotFoundError, ObjectStore, StoreError, Telemetry, TooLargeError

_PAUSE_SECONDS: Final = 0.5

T = TypeVar("T")


class WaitingState(RepeatingStore):
    """Decorates the store of a node's own state: an operation fails only if trying again would not help.

    NotFoundError and TooLargeError are final, and so is StateError, which is no StoreError.

    Args:
        telemetry: gets `disk-failing` when the first operation begins to wait, and again when the cause changes, and
            `disk-works-again` when the last one has ended.
    """

    def __init__(self, state: ObjectStore, telemetry: Telemetry) -> None:
        super().__init__(state)
        self._telemetry = telemetry
        self._waiting = 0  # operations
        self._cause: object = None  # of the last report
        self._start_time = 0.0  # of the outage, in trio's seconds

    async def _repeat(self, where: str, action: Callable[[], Awaitable[T]]) -> T:
        waits = False
        try:
            while True:
                try:
                    result = await action()
                    break
                except (NotFoundError, TooLargeError):
                    raise
                except StoreError as error:
                    self._report(error)
                self._waiting += not waits
                waits = True
                await trio.sleep(_PAUSE_SECONDS)
            if waits and self._waiting == 1:
                seconds = round(trio.current_time() - self._start_time, 1)
                self._telemetry.event("disk-works-again", seconds=seconds)
            return result
        finally:
            self._waiting -= waits
            if not self._waiting:
                self._cause = None

    def _report(self, error: StoreError) -> None:
        """Report an error unless the last one had the same cause. Two operations differ in their paths, not in it."""
        if not self._waiting and self._cause is None:
            self._start_time = trio.current_time()
        cause = error.__cause__.errno if isinstance(error.__cause__, OSError) else type(error.__cause__)
        if cause != self._cause:
            self._telemetry.event("disk-failing", error=f"{error}; this process waits until the disk takes it")
        self._cause = cause
