"""What bench/wan.py starts on its machines: a real publisher with its beacon, and real followers, without learning or
mining.

    python -m bench.wan_nodes publish RUN.toml --pair FILE --tensors 4
    python -m bench.wan_nodes follow RUN.toml --name miner-1

The publisher publishes version v when a file `go-v` appears beside its run.toml: the first version is an anchor, the
others are patches as dense as those of workload A1 (bench/checkpoints.py). A follower goes to the newest version as
soon as the head shows it.
"""

import argparse
from pathlib import Path

import torch
import trio

from grailnode.config import Config
from grailnode.node.processes import Launch, make_node, publish_beacon
from grailnode.node.telemetry import NodeTelemetry
from grailnode.node.wiring import run_publisher
from grailnode.run.joining import open_config
from protocol import paths
from protocol.chain import safetensors
from protocol.digest import Weights
from protocol.errors import ProtocolError
from roles.node.identity import Node
from roles.policy.follower import Follower
from roles.ports import StoreError
from roles.trainer.publish.publisher import PublisherSettings
from roles.trainer.spool import SnapshotName, newest_published_version, put_snapshot

_POLL_SECONDS = 0.1


def weights_of(version: int, pair: Weights, tensors: int) -> Weights:
    """The weights of a version: so many tensors, the same one turned by other numbers of rows.

    Each of its elements is the pair's first or its second, drawn anew for each version, so that half of those in which
    the pair differs change from one version to the next, and no two patches are alike.
    """
    generator = torch.Generator().manual_seed(version)
    second = torch.rand(pair["before"].shape, generator=generator) < 0.5
    drawn = torch.where(second, pair["after"], pair["before"])
    return {f"layer-{number}": torch.roll(drawn, 37 * number, 0).contiguous() for number in range(tensors)}


async def publish(config: Config, pair: Path, tensors: int) -> None:
    """Publish versions as they are asked for, for ever."""
    node = make_node(config, "trainer", _telemetry(config, "trainer"))
    views = safetensors.read(pair.read_bytes())
    await node.publish(paths.run(node.run_id), config.at(config.run.manifest).read_bytes())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(publish_beacon, node, Launch(config, "beacon", "trainer"))
        nursery.start_soon(run_publisher, node, PublisherSettings(anchor_interval=1 << 20, shard_bytes=1 << 28))
        for version in range(1 << 20):
            while not config.at(Path(f"go-{version}")).exists():
                await trio.sleep(_POLL_SECONDS)
            await put_snapshot(node.state, SnapshotName(version, version), weights_of(version, views, tensors))
            node.telemetry.event("offered", version=version)
            while await newest_published_version(node.state) < version:
                await trio.sleep(_POLL_SECONDS)


async def follow(config: Config, name: str) -> None:
    """Follow the chain, for ever."""
    node = make_node(config, name, _telemetry(config, name))
    follower = await Follower.open(node)
    while True:
        try:
            await _go_on(node, follower)
        except (StoreError, ProtocolError) as error:
            node.telemetry.event("cannot-follow", error=str(error))
        await trio.sleep(_POLL_SECONDS)


async def _go_on(node: Node, follower: Follower) -> None:
    """To the head, if it is ahead. Refreshing fetches a patch, holding applies it (and fetches an anchor)."""
    await follower.refresh()
    head, newest = follower.chain.head, follower.newest
    if head is not None and (newest is None or newest.version < head.version):
        fetched = trio.current_time()
        held = await follower.rebuild(head.version)
        seconds = trio.current_time() - fetched
        node.telemetry.event(
            "verified", version=held.version, weights=held.digest.hex(), hold_seconds=round(seconds, 3)
        )


def _telemetry(config: Config, name: str) -> NodeTelemetry:
    return NodeTelemetry.to_file(name, config.at(config.node.logs) / f"{name}.jsonl")


def main() -> None:
    """The command."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["publish", "follow"])
    parser.add_argument("run")
    parser.add_argument("--name", default="")
    parser.add_argument("--pair", type=Path)
    parser.add_argument("--tensors", type=int, default=1)
    arguments = parser.parse_args()
    config = open_config(arguments.run)
    if arguments.what == "publish":
        trio.run(publish, config, arguments.pair, arguments.tensors)
    else:
        trio.run(follow, config, arguments.name)


if __name__ == "__main__":
    main()
