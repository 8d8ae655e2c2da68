"""A node's own state on a disk that may be full, read-only or failing for a while: the node waits, and loses nothing.

A role changes its state in several steps, each of which relies on those before. If one of them could fail, each role
would have to know what a failure in the middle of them leaves behind. So an operation that the disk refuses is repeated
until the disk takes it. Meanwhile the task that needs it waits, the other tasks go on, and the log says why.
"""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import trio

from grailnode.store.decorators.retrying import RepeatingStore
from roles.node.retries import WaitReporter
from roles.ports import NotFoundError, ObjectStore, StoreError, Telemetry, TooLargeError

_PAUSE_SECONDS: Final = 0.5

T = TypeVar("T")


class WaitingState(RepeatingStore):
    """Decorates the store of a node's own state: an operation fails only if trying again would not help.

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
                await trio.sleep(_PAUSE_SECONDS)
        finally:
            self._waiting -= waits
            if not self._waiting:
                self._reporter.over()

    def _report(self, error: StoreError) -> None:
        """Report an error. Two operations that fail for one cause differ in their paths alone."""
        cause = error.__cause__.errno if isinstance(error.__cause__, OSError) else type(error.__cause__)
        text = f"{error}; this process waits until the disk takes it"
        self._reporter.waiting("disk", text, "the disk takes what this node must not forget: free space there", cause)
