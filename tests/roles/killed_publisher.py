"""A publisher that is killed at one of its puts and deletes, by its number or by its path."""

from collections.abc import Callable
from typing import Any

import trio

from grailnode.store.memory import MemoryStore
from tests.roles.publisher_testbed import PublisherTestbed
from tests.support.faults.crash_trigger import CrashingStore, CrashTrigger


async def killed_at(testbed: PublisherTestbed, operation: int, seconds: float, *, after: bool, **options: Any) -> bool:
    """Publish, and kill the publisher before or after one of its puts and deletes, counted from 0 over store and state.

    Args:
        options: as for `PublisherTestbed.publish`.

    Returns:
        Whether there were as many puts and deletes.
    """
    has_crashed, scope = False, trio.CancelScope()

    async def crash() -> None:
        nonlocal has_crashed
        has_crashed = True
        scope.cancel()
        await trio.sleep_forever()

    trigger = CrashTrigger(lambda name, path: name in {"put", "delete"}, operation, after, crash)
    store, state = testbed.store, testbed.state
    crashing_stores: Any = [CrashingStore(inner, trigger) for inner in (store, state)]
    testbed.store, testbed.state = crashing_stores
    with scope:
        await testbed.publish(seconds, **options)
    testbed.store, testbed.state = store, state
    return has_crashed


class KilledError(Exception):
    """The process that uses a state was killed."""


class DeadlyState(MemoryStore):
    """A state whose process is killed just before a put or delete for which `is_deadly` returns True."""

    def __init__(self) -> None:
        super().__init__()
        self.is_deadly: Callable[[str, str], bool] = lambda operation, path: False

    async def put(self, path: str, data: bytes) -> None:
        if self.is_deadly("put", path):
            raise KilledError
        await super().put(path, data)

    async def delete(self, path: str) -> None:
        if self.is_deadly("delete", path):
            raise KilledError
        await super().delete(path)


async def publish_until_killed(testbed: PublisherTestbed, operation: str, prefix: str, **options: Any) -> None:
    """Publish until the process is killed before an operation on a path with a prefix."""
    state, has_crashed = DeadlyState(), False
    async for item in testbed.state.list(""):
        await state.put(item.path, await testbed.state.get(item.path, 1 << 30))
    state.is_deadly = lambda name, path: name == operation and path.startswith(prefix)
    testbed.state = state
    try:
        await testbed.publish(**options)
    except* KilledError:
        has_crashed = True
    state.is_deadly = lambda name, path: False
    assert has_crashed
