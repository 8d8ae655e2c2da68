"""Requests a second at a trainer's space from followers that read it, or mirrors of it, on a virtual clock.

Run `python -m bench.mirrors [--followers 200] [--mirrors 4] [--window 60] [--windows 4]`.
"""

import argparse
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import trio

from grailnode.run import creation
from grailnode.store.decorators.mirrored import MirroredStore
from grailnode.store.memory import MemoryStore
from protocol import paths
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
_TRAINER = key("trainer").public


class CountedStore:
    """Decorates a store, and counts reads of the trainer's objects, of other objects, and the bytes of both."""

    def __init__(self, store: ObjectStore, counts: Counter[str]) -> None:
        self._store, self._counts = store, counts
        self.put, self.delete, self.list = store.put, store.delete, store.list

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        place = "trainer" if path.startswith(paths.writer_prefix(_TRAINER)) else "others"
        self._counts[place] += 1
        data = await self._store.get(path, max_bytes, offset=offset, size=size)
        self._counts[f"{place} bytes"] += len(data)
        return data


async def _run_under_authority(node: Node, work: Callable[[], Awaitable[None]]) -> None:
    async with under_authority(node):
        await work()


def measure(followers: int, mirrors: int, window: float, windows: int) -> tuple[dict[str, float], list[int]]:
    """Return the reads a second of followers and mirrors at the trainer's and other spaces, with bytes, and the
    versions that the followers have in the end.
    """
    counts = Counter[str]()
    copies: dict[str, ObjectStore] = {f"https://mirror-{number}.example": MemoryStore() for number in range(mirrors)}

    async def scenario() -> tuple[float, list[int]]:
        network = Network(demo_rules(groups=4, group_size=8))
        beacon = network.run.beacon
        network.amend(
            authority=network.run.authority.model_copy(update={"mirrors": tuple(copies)}),
            beacon=BEACON_KEY.chain(round(window * 1000 / network.run.schedule.rounds), beacon.genesis_ms),
            head_ttl=max(30, round(window)),
        )
        origin = CountedStore(network.store, counts)
        async with run_nodes(network) as nursery:
            files = creation.model_files(network.policy.directory)
            await creation.publish_files(network.store, _TRAINER, files)
            await network.until_window(1)
            for number, copy in enumerate(copies.values()):
                node = network.node(f"mirror-{number}", store=origin)
                nursery.start_soon(_run_under_authority, node, partial(Mirror(node, copy).keep, 0.5))
            nodes = [_follower_node(network, origin, copies, number) for number in range(followers)]
            chains = [await Follower(node).open() for node in nodes]
            await network.until_window(_SETTLE_WINDOWS)
            for node, chain in zip(nodes, chains, strict=True):
                nursery.start_soon(_run_under_authority, node, partial(keep_fresh, node, chain, 0.2))
            await network.until_window(_SETTLE_WINDOWS + 1)
            counts.clear()
            start = trio.current_time()
            await network.until_window(_SETTLE_WINDOWS + 1 + windows)
            newest = [chain.chain.head.version for chain in chains if chain.chain.head is not None]
            return trio.current_time() - start, newest

    seconds, newest = simulate(scenario)
    return {name: count / seconds for name, count in sorted(counts.items())}, newest


def _follower_node(network: Network, origin: ObjectStore, copies: dict[str, ObjectStore], number: int) -> Node:
    name, rng = f"follower-{number}", random.Random(number)
    node = network.node(name, store=origin)
    store = MirroredStore(
        origin, node.revisions, node.key.public, node.run.head_ttl, network.clock, copies.__getitem__, node.telemetry,
        rng, inline,
    )  # fmt: skip
    object.__setattr__(node, "store", store)
    return node


def table(followers: int, mirrors: int, window: float, windows: int) -> Sequence[str]:
    """Return a line for followers without mirrors, as many as there are mirrors, and one for all with mirrors."""
    lines = ["followers  mirrors  trainer's space/s  bytes/s  other spaces/s  versions"]
    for count, copies in ((mirrors, 0), (followers, mirrors)):
        rates, newest = measure(count, copies, window, windows)
        values = (rates.get(name, 0.0) for name in ("trainer", "trainer bytes", "others"))
        lines.append(
            "{:9}{:9}{:19.2f}{:9.0f}{:16.2f}".format(count, copies, *values) + f"  {min(newest)} to {max(newest)}"
        )
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
