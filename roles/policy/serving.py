"""What miner and validator do with the weights they follow: fetch newer ones, and have the engine serve them."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from weakref import WeakKeyDictionary

import trio

from protocol.errors import ProtocolError
from roles.gather import first_failure
from roles.node.identity import LOOKS, Node
from roles.node.retries import WaitReporter
from roles.policy.follower import Follower
from roles.policy.verified_weights import PatchStep, VerifiedWeights
from roles.ports import Engine, EngineError, StoreError

_serving_digests: WeakKeyDictionary[Engine, bytes] = WeakKeyDictionary()
"""The digest of the weights that an engine serves: after a rewind a version has other weights than before."""

_REVISION_POLL_SECONDS = 1.0
_LONGEST_LOOKS = 24  # in a window, while no head is due
_DUE_LOOKS = 150  # in a window, while one is
_PAUSE_SHARE = 0.25  # of the time to or since the moment at which a head is due


async def serve(node: Node, engine: Engine, weights: VerifiedWeights) -> None:
    """Have the engine serve these weights, by patches if it takes them and serves a version that leads here."""
    digest = _serving_digests.get(engine)
    if engine.version == weights.version and digest == weights.digest:
        return
    steps = weights.steps_from(digest) if engine.version is not None and engine.takes_patches else ()
    if not steps or not await _patch(node, engine, steps):
        await engine.stage(weights.version, weights.weights)
        await engine.commit()
        _serving_digests[engine] = weights.digest
    node.telemetry.event("serving", version=weights.version, weights=weights.digest.hex(), patches=len(steps))


async def _patch(node: Node, engine: Engine, steps: tuple[PatchStep, ...]) -> bool:
    """Have the engine apply patches; return False if it refused one, so that it needs the whole weights."""
    for step in steps:
        try:
            await engine.stage_patch(step.manifest.version, step.patch, step.manifest)
            await engine.commit()
        except EngineError as error:
            node.telemetry.event("engine-refused-patch", version=step.manifest.version, error=str(error))
            return False
        _serving_digests[engine] = step.manifest.weights
    return True


class HeadPace:
    """When to look for a head: a trainer that published a version publishes the next one a window later, more or less.
    Pauses between looks are short at that moment and longer the farther it is; together they are fewer looks than if
    all pauses were alike, and a version is seen sooner.
    """

    def __init__(self, node: Node, least_seconds: float) -> None:
        """Wait at least `least_seconds` between two looks."""
        schedule, period = node.run.schedule, node.run.beacon.period_ms / 1000
        self._window_seconds = schedule.rounds * period
        self._usual, self._longest, self._shortest = (
            node.pace(least_seconds, looks) for looks in (LOOKS, _LONGEST_LOOKS, _DUE_LOOKS)
        )
        self._version: int | None = None
        self._seen: float | None = None  # trio's time at which the newest version came, if this was observed

    def pause(self, version: int) -> float:
        """Return how many seconds to wait after a look, which showed that this version is the newest."""
        now = trio.current_time()
        if version != self._version:
            self._seen = None if self._version is None else now
            self._version = version
        if self._seen is None:
            return self._usual
        windows = max(1, round((now - self._seen) / self._window_seconds))
        distance = abs(now - self._seen - windows * self._window_seconds)
        return max(self._shortest, min(self._longest, _PAUSE_SHARE * distance))


async def keep_fresh(node: Node, follower: Follower, poll_seconds: float) -> None:
    """Refresh a follower for ever, and fetch the next patches beside that: a download that hangs hides no newer head. A
    failure is reported once, and when it changes. Looks are `poll_seconds` apart, or more where windows are long.
    """
    pace = HeadPace(node, poll_seconds)
    send_refreshed, receive_refreshed = trio.open_memory_channel[None](1)

    async def refresh() -> None:
        await follower.refresh()
        with suppress(trio.WouldBlock):
            send_refreshed.send_nowait(None)

    async def prefetch() -> None:
        if follower.newest is not None:
            await follower.prefetch()
        elif follower.chain.head is not None:
            # the version that serves now, before the first window asks for one
            await follower.rebuild(follower.version_for(max(0, node.window())))

    async def pause() -> None:
        head = follower.chain.head
        await trio.sleep(pace.pause(-1 if head is None else head.version))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_repeat, node, refresh, pause)
        nursery.start_soon(_repeat, node, prefetch, receive_refreshed.receive)


async def _repeat(node: Node, work: Callable[[], Awaitable[object]], pause: Callable[[], Awaitable[object]]) -> None:
    reporter = WaitReporter(node.telemetry, "cannot-follow")
    while True:
        try:
            await run_unless_revised(node, work)
            reporter.over()
        except (StoreError, ProtocolError) as error:
            reporter.waiting("policy", error, "storage shows a valid head, and the objects of its versions")
        await pause()


async def run_unless_revised(node: Node, work: Callable[[], Awaitable[object]]) -> None:
    """Run the work, and cancel it as soon as a revision changes the authority: it may be reading from the space of the
    very key that this revokes, whose owner may send one byte a second.
    """
    number = node.revisions.number
    async with first_failure(Exception) as tasks:

        async def finish_work() -> None:
            await work()
            tasks.cancel_scope.cancel()

        tasks.start_soon(finish_work)
        while node.revisions.number == number:
            await trio.sleep(_REVISION_POLL_SECONDS)
        tasks.cancel_scope.cancel()
