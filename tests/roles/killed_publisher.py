"""A publisher that is killed at one of its puts and deletes."""

from typing import Any

import trio

from tests.roles.test_publisher import Site
from tests.support.faults.tripwire import TrippingStore, Tripwire


async def killed_at(site: Site, operation: int, seconds: float, *, after: bool, **options: Any) -> bool:
    """Publish, and kill the publisher before or after one of its puts and deletes, counted from 0 over store and state.

    Args:
        options: as for `Site.publish`.

    Returns:
        Whether there were as many puts and deletes.
    """
    died, scope = False, trio.CancelScope()

    async def strike() -> None:
        nonlocal died
        died = True
        scope.cancel()
        await trio.sleep_forever()

    wire = Tripwire(lambda name, path: name in {"put", "delete"}, operation, after, strike)
    store, state = site.store, site.state
    tripping_stores: Any = [TrippingStore(inner, wire) for inner in (store, state)]
    site.store, site.state = tripping_stores
    with scope:
        await site.publish(seconds, **options)
    site.store, site.state = store, state
    return died
