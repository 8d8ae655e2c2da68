"""Followers that read a trainer's space, or mirrors of it, on a virtual clock: the load there, and how late they serve.

Run `python -m bench.mirrors [--followers 200] [--mirrors 4] [--window 60] [--windows 4]`. Each read takes 50 ms. A
version is late by the seconds from its head in the trainer's space until a follower has verified its weights.
"""

import argparse
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from statistics import mean

import trio

from grailnode.run import creation
from grailnode.store.decorators.mirrored import MirroredStore
from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.chain.manifest import Head
from protocol.identity.signing import open_signed
from roles.authority_updates import under_authority
from roles.node.identity import Node
from roles.policy.follower import Follower
from roles.policy.mirroring import Mirror
from roles.policy.serving import keep_fresh
from roles.ports import ObjectStore
from tests.support.builders.recipes import demo_rules
from tests.support.simulation.network import BEACON_KEY, Network, inline, key
from tests.support.simulation.network_runs import run_nodes
from tests.support.simulation.virtual_clock import simulate

_SETTLE_WINDOWS = 2
_READ_SECONDS = 0.05
_TRAINER = key("trainer").public


class CountedStore:
    """Decorates a store, and counts reads of the trainer's objects, of other objects, and the bytes of both."""

    def __init__(self, store: ObjectStore, counts: Counter[str]) -> None:
        self._store, self._counts = store, counts
        self.put, self.delete, self.list = store.put, store.delete, store.list

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        await trio.sleep(_READ_SECONDS)
        place = "trainer" if path.startswith(paths.writer_prefix(_TRAINER)) else "others"
        self._counts[place] += 1
        data = await self._store.get(path, max_bytes, offset=offset, size=size)
        self._counts[f"{place} bytes"] += len(data)
        return data


async def _run_under_authority(node: Node, work: Callable[[], Awaitable[None]]) -> None:
    async with under_authority(node):
        await work()


class HeadTimes(MemoryStore):
    """Notes when each version's head comes, in seconds of trio's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[int, float] = {}

    async def put(self, path: str, data: bytes) -> None:
        await super().put(path, data)
        if path == paths.head(_TRAINER):
            self.times.setdefault(open_signed(data, Head, [_TRAINER]).record.version, trio.current_time())


class TimedFollower(Follower):
    """Serves the newest version, and notes how late."""

    def __init__(self, node: Node, times: dict[int, float], delays: list[float]) -> None:
        super().__init__(node)
        self._times, self._delays = times, delays

    async def prefetch(self) -> None:
        await super().prefetch()
        served = self.newest.version if self.newest is not None else -1
        if self.chain.head is not None and self.chain.head.version > served >= 0:
            version = (await self.rebuild(self.chain.head.version)).version
            self._delays.append(trio.current_time() - self._times[version])


def measure(
    followers: int, mirrors: int, window: float, windows: int, *, reads_mirrors: bool
) -> tuple[dict[str, float], list[float]]:
    """Return the reads a second of followers and mirrors at the trainer's and other spaces, with bytes, and the seconds
    by which each follower served each version late. The run is the same with mirrors that nobody serves or reads.
    """
    counts, delays = Counter[str](), list[float]()
    copies: dict[str, ObjectStore] = {
        f"https://mirror-{number}.example": CountedStore(MemoryStore(), Counter()) for number in range(mirrors)
    }

    async def scenario() -> float:
        network = Network(demo_rules(groups=4, group_size=8))
        beacon = network.run.beacon
        network.amend(
            authority=network.run.authority.model_copy(update={"mirrors": tuple(copies)}),
            beacon=BEACON_KEY.chain(round(window * 1000 / network.run.schedule.rounds), beacon.genesis_ms),
            head_ttl=max(30, round(window)),
        )
        network.store = store = HeadTimes()
        origin = CountedStore(store, counts)
        async with run_nodes(network) as nursery:
            files = creation.model_files(network.policy.directory)
            await creation.publish_files(network.store, _TRAINER, files)
            await network.until_window(1)
            for number, copy in enumerate(copies.values() if reads_mirrors else ()):
                node = network.node(f"mirror-{number}", store=origin)
                nursery.start_soon(_run_under_authority, node, partial(Mirror(node, copy).keep, 0.2))
            nodes = [network.node(f"follower-{number}", store=origin) for number in range(followers)]
            for number, node in enumerate(nodes if reads_mirrors else ()):
                _read_mirrors(network, node, copies, random.Random(number))
            chains = [await TimedFollower(node, store.times, delays).open() for node in nodes]
            await network.until_window(_SETTLE_WINDOWS)
            for node, chain in zip(nodes, chains, strict=True):
                nursery.start_soon(_run_under_authority, node, partial(keep_fresh, node, chain, 0.2))
            await network.until_window(_SETTLE_WINDOWS + 1)
            counts.clear()
            delays.clear()
            start = trio.current_time()
            await network.until_window(_SETTLE_WINDOWS + 1 + windows)
            return trio.current_time() - start

    seconds = simulate(scenario)
    return {name: count / seconds for name, count in sorted(counts.items())}, delays


def _read_mirrors(network: Network, node: Node, copies: dict[str, ObjectStore], rng: random.Random) -> None:
    ttl, own, clock = node.run.head_ttl, node.key.public, network.clock
    store = MirroredStore(node.store, node.revisions, own, ttl, clock, copies.__getitem__, node.telemetry, rng, inline)
    object.__setattr__(node, "store", store)


def table(followers: int, mirrors: int, window: float, windows: int) -> Sequence[str]:
    """Return a line for followers without mirrors, as many as there are mirrors, and one for all with mirrors."""
    lines = ["followers  mirrors  trainer's space/s  bytes/s  other spaces/s  late: mean  worst"]
    for count, copies in ((mirrors, 0), (followers, mirrors)):
        rates, delays = measure(count, mirrors, window, windows, reads_mirrors=copies > 0)
        values = (rates.get(name, 0.0) for name in ("trainer", "trainer bytes", "others"))
        late = f"{mean(delays):12.2f}{max(delays):7.2f}"
        lines.append("{:9}{:9}{:19.2f}{:9.0f}{:16.2f}".format(count, copies, *values) + late)
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--followers", type=int, default=200)
    parser.add_argument("--mirrors", type=int, default=4)
    parser.add_argument("--window", type=float, default=60.0, help="seconds of a window")
    parser.add_argument("--windows", type=int, default=4, help="windows that are measured")
    options = parser.parse_args()
    print("\n".join(table(options.followers, options.mirrors, options.window, options.windows)))


if __name__ == "__main__":
    main()
