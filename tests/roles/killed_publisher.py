"""A publisher that is killed at one of its puts and deletes."""

from typing import Any

import trio

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
