"""Runs the nodes of a simulated network, and reads the records that they have published."""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import trio

from protocol import limits, paths
from protocol.identity.signing import PublishedRecord, SigningKey
from protocol.judging.ledger import Summary
from protocol.judging.verdict import Judgement, Verdict
from protocol.rollout.batch import Commitment, Group, open_group
from roles.miner.produce import HonestProducer, MiningWindow
from roles.ports import NotFoundError
from roles.records import fetch_record
from tests.support.builders.recipes import demo_rules
from tests.support.simulation.network import Network, key

RULES = demo_rules(groups=4, group_size=8)
Kind = TypeVar("Kind", bound=PublishedRecord)


@asynccontextmanager
async def run_nodes(network: Network, **options: int) -> AsyncIterator[trio.Nursery]:
    """Run the network's nodes until the end of the block."""
    async with trio.open_nursery() as nursery:
        network.start(nursery, **options)
        yield nursery
        nursery.cancel_scope.cancel()


async def records(network: Network, kind: type[Kind], windows: range, path_of: Callable[[int], str]) -> dict[int, Kind]:
    """Return the published records at the path of each window, by window."""
    found = {}
    for window in windows:
        with suppress(NotFoundError):
            found[window] = (await fetch_record(network.node("reader"), kind, path_of(window))).record
    return found


async def verdicts(
    network: Network, miner: str | SigningKey, windows: range, name: str = "validator-0"
) -> dict[int, Verdict]:
    """Return a validator's verdicts on a miner, by window."""
    judge, judged = key(name).public, (miner if isinstance(miner, SigningKey) else key(miner)).public
    return await records(network, Verdict, windows, lambda window: paths.verdict(judge, window, judged))


async def check_accepted(network: Network, miner: str, windows: range, at_least: int = 0) -> None:
    """Check that the first validator judged a miner in at least so many windows, and rejected none of its groups."""
    verdicts_by_window = await verdicts(network, miner, windows)
    assert len(verdicts_by_window) >= at_least
    assert all(item.accepted for verdict in verdicts_by_window.values() for item in verdict.judgements)


def newest_published(network: Network) -> int:
    """Return the newest version that the trainer has published, and check that it has published all before it."""
    versions = [event["version"] for event in network.events("trainer/upload", "published")]
    assert sorted(set(versions)) == list(range(versions[-1] + 1))
    newest: int = versions[-1]
    return newest


async def summaries(network: Network, validator: str, windows: range) -> list[Summary]:
    public = key(validator).public
    return [*(await records(network, Summary, windows, lambda window: paths.summary(public, window))).values()]


def used_groups(network: Network, windows: Iterable[int], miner: str = "") -> dict[int, int]:
    """Return how many groups of each window the trainer took, of one miner or of all."""
    short = key(miner).public.hex()[:8]
    events = network.events("trainer/download", "collected")
    return {
        window: sum(e["used"] for e in events if e["window"] == window and (not miner or e["miner"] == short))
        for window in windows
    }


def with_sketches(group: Group, alter: Callable[[bytes], bytes], count: int | None = None) -> Group:
    """Return a group with other sketches of its first rollouts, by default of all."""
    altered = [item.model_copy(update={"sketch": alter(item.sketch)}) for item in group.rollouts[:count]]
    return group.model_copy(update={"rollouts": (*altered, *group.rollouts[len(altered) :])})


class FalseSketches(HonestProducer):
    """Sends sketches of zeros from one window on."""

    first_false_window = 0

    async def produce(self, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
        groups = await super().produce(mining_window, indices)
        if mining_window.window < self.first_false_window:
            return groups
        return [with_sketches(group, lambda sketch: bytes(len(sketch))) for group in groups]


async def judged_groups(network: Network, miner: str, windows: range) -> list[tuple[Group, Judgement]]:
    """Return a miner's groups from storage, with the first validator's judgements on them."""
    groups = []
    public = key(miner).public
    for window, verdict in (await verdicts(network, miner, windows)).items():
        path = paths.commitment(public, window)
        commitment = (await fetch_record(network.node("checker"), Commitment, path)).record
        batch = await network.store.get(paths.batch(public, window, commitment.batch), limits.MAX_BATCH_BYTES)
        for judgement in verdict.judgements:
            offset, size = commitment.extent(judgement.index)
            groups.append((open_group(batch[offset : offset + size], commitment, judgement.index), judgement))
    assert groups
    return groups
