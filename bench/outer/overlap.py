"""The share of the time in which sites take local steps, with and without a delay, on a virtual clock.

Three sites and their coordinator are the product's, with a learner that is small and whose step takes a stated time.
So does each transfer of a payload, up or down, on the link of its node; everything else takes no time. A site may take
as many steps as it has time for.
"""

from collections.abc import Callable
from typing import Any, Final

import trio

from bench.tables import print_table
from protocol.identity.signing import SigningKey
from roles.node.identity import Node
from roles.ports import ObjectStore
from tests.support.builders.samples import round_rules
from tests.support.simulation.network import Log
from tests.support.simulation.outer_sites import ROUND_SECONDS, OuterTestbed
from tests.support.simulation.virtual_clock import simulate

SITES: Final = 3
ROUNDS: Final = 6
STEPS: Final = 64
STEP_SECONDS: Final = 0.2


class SlowLink:
    """A store on whose link one payload travels at a time."""

    def __init__(self, store: ObjectStore, seconds: float) -> None:
        self._store, self._seconds, self._link = store, seconds, trio.Lock()
        self.delete, self.list = store.delete, store.list

    async def _transfer(self, path: str) -> None:
        if "/payloads/" in path:
            async with self._link:
                await trio.sleep(self._seconds)

    async def put(self, path: str, data: bytes) -> None:
        await self._transfer(path)
        await self._store.put(path, data)

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        await self._transfer(path)
        return await self._store.get(path, max_bytes, offset=offset, size=size)


class TimedTestbed(OuterTestbed):
    """A run whose steps and transfers take time."""

    def __init__(self, transfer: float, delay: int) -> None:
        super().__init__(SITES, round_rules(local_steps=STEPS, quorum=1, delay=delay), payload_seconds=60.0)
        self._transfer = transfer

    def node(self, log: Log, state: ObjectStore, signing_key: SigningKey, store: ObjectStore | None = None) -> Node:
        """Return a node with a link of its own."""
        node = super().node(log, state, signing_key, store)
        object.__setattr__(node, "store", SlowLink(node.store, self._transfer))
        object.__setattr__(node, "run_sync", _timed)
        return node


async def _timed(function: Callable[..., Any], *arguments: Any) -> Any:
    await trio.sleep(STEP_SECONDS if getattr(function, "__name__", "") == "step" else 0.0)
    return function(*arguments)


def overlap() -> None:
    """Print the table."""
    print_table(
        f"{SITES} sites, steps of {STEP_SECONDS:g} s, rounds of {ROUND_SECONDS:g} s and the time to close them",
        ("seconds a payload", "delay", "a round", "steps a site and round", "ahead", "computing"),
        ([f"{transfer:g}", str(delay), *_measure(transfer, delay)] for transfer in (0.1, 0.3) for delay in (0, 1)),
    )


def _measure(transfer: float, delay: int) -> list[str]:
    cells: list[str] = []

    async def scenario() -> None:
        testbed = TimedTestbed(transfer, delay)
        start = testbed.clock.now()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(testbed.feed, 30)
            nursery.start_soon(testbed.run_coordinator)
            for name in testbed.names:
                nursery.start_soon(testbed.run_site, testbed.handles[name])
            await testbed.until(lambda: len(testbed.coordinator_log.named("round-closed")) > ROUNDS)
            nursery.cancel_scope.cancel()
        seconds = testbed.clock.now() - start
        steps = [event for name in testbed.names for event in testbed.handles[name].log.named("local-step")]
        closed = len(testbed.coordinator_log.named("round-closed"))
        ahead = sum(event["ahead"] for event in steps) / len(steps)
        share = STEP_SECONDS * len(steps) / SITES / seconds
        per_round = len(steps) / SITES / closed
        cells.extend([f"{seconds / closed:.1f} s", f"{per_round:.1f}", f"{ahead:.0%}", f"{share:.0%}"])

    simulate(scenario)
    return cells
