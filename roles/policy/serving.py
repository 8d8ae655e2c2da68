"""What miner and validator do with the weights they follow: keep looking for newer ones, and have the engine serve
them.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from weakref import WeakKeyDictionary

import trio

from protocol.errors import ProtocolError
from roles.first_failure import first_failure
from roles.node.change_reporter import ChangeReporter
from roles.node.identity import Node
from roles.policy.follower import Follower, VerifiedWeights
from roles.ports import Engine, StoreError

_served: WeakKeyDictionary[Engine, bytes] = WeakKeyDictionary()
"""The digest of what an engine serves: after a rewind a version's number stands for other weights than before."""

_LOOK_SECONDS = 1.0


async def serve(node: Node, engine: Engine, held: VerifiedWeights) -> None:
    """Have the engine serve these weights.

    Raises:
        EngineError: it cannot; it still serves what it served.
    """
    if engine.version != held.version or _served.get(engine) != held.digest:
        await engine.stage(held.version, held.weights)
        await engine.commit()
        _served[engine] = held.digest
        node.telemetry.event("serving", version=held.version, weights=held.digest.hex())


async def keep_fresh(node: Node, follower: Follower, poll_seconds: float) -> None:
    """Refresh a follower for ever, and fetch what comes next beside that: bytes that hang must not hide a newer head.

    A failure is told once, and again when it changes.
    """
    looked, to_prepare = trio.open_memory_channel[None](1)

    async def look() -> None:
        await follower.refresh()
        with suppress(trio.WouldBlock):
            looked.send_nowait(None)

    async def prepare() -> None:
        if follower.newest is not None:
            await follower.prefetch()
        elif follower.chain.head is not None:
            await follower.hold(_first_version(node, follower))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_repeat, node, look, partial(trio.sleep, poll_seconds))
        nursery.start_soon(_repeat, node, prepare, to_prepare.receive)


async def _repeat(node: Node, work: Callable[[], Awaitable[object]], pause: Callable[[], Awaitable[object]]) -> None:
    reporter = ChangeReporter(node.telemetry, "cannot-follow")
    while True:
        try:
            await _unless_revised(node, work)
            reporter.success()
        except (StoreError, ProtocolError) as error:
            reporter.failure(error)
        await pause()


async def _unless_revised(node: Node, work: Callable[[], Awaitable[object]]) -> None:
    """Give up what is under way when somebody's rights change meanwhile: it may come from a thief, who drips."""
    number = node.revisions.number
    async with first_failure(StoreError, ProtocolError) as tasks:

        async def finish_work() -> None:
            await work()
            tasks.cancel_scope.cancel()

        tasks.start_soon(finish_work)
        while node.revisions.number == number:
            await trio.sleep(_LOOK_SECONDS)
        tasks.cancel_scope.cancel()


def _first_version(node: Node, follower: Follower) -> int:
    """The version to rebuild before the first window asks for one: the one that serves now, so that it starts at once."""
    return follower.version_for(max(0, node.window()))
