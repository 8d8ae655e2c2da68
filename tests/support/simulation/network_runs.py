"""Runs the nodes of a simulated network, and reads the records that they have published."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from protocol import limits, paths
from protocol.identity.signing import SigningKey, open_signed
from protocol.judging.ledger import Summary
from protocol.judging.verdict import Verdict
from roles.ports import NotFoundError
from tests.support.builders.recipes import demo_rules
from tests.support.simulation.network import Network, key

RULES = demo_rules(groups=4, group_size=8)


@asynccontextmanager
async def run_nodes(network: Network, **options: int) -> AsyncIterator[trio.Nursery]:
    """Run the network's nodes until the end of the block."""
    async with trio.open_nursery() as nursery:
        network.start(nursery, **options)
        yield nursery
        nursery.cancel_scope.cancel()


async def verdicts(network: Network, miner: str | SigningKey, windows: range) -> dict[int, Verdict]:
    """Return the first validator's verdicts on a miner, by window."""
    validator = key("validator-0").public
    miner_key = miner if isinstance(miner, SigningKey) else key(miner)
    verdicts_by_window = {}
    for window in windows:
        path = paths.verdict(validator, window, miner_key.public)
        if [item.path async for item in network.store.list(path)]:
            data = await network.store.get(path, limits.MAX_VERDICT_BYTES)
            verdicts_by_window[window] = open_signed(data, Verdict, [validator]).record
    return verdicts_by_window


async def summaries(network: Network, validator: str, windows: range) -> list[Summary]:
    entries = []
    for window in windows:
        try:
            data = await network.store.get(paths.summary(key(validator).public, window), Summary.max_bytes)
            entries.append(open_signed(data, Summary, [key(validator).public]).record)
        except NotFoundError:
            continue
    return entries
