"""The nodes of bench/wan.py: a real publisher with its beacon, or a real follower, without learning and mining.

    python -m bench.wan_nodes publish RUN.toml --pair FILE --tensors 4
    python -m bench.wan_nodes follow RUN.toml --name miner-1

bench/wan.py starts this command on its machines; it measures nothing by itself and runs until it is killed. The
publisher publishes version v when a file `go-v` appears beside its run.toml. Version 0 is an anchor; the others are
patches as dense as those of workload A1 (bench/checkpoints.py). A follower applies the newest version as soon as it has
read the head. The command needs the directory of a run whose genesis is version 0.
"""

import argparse
from pathlib import Path

import torch
import trio

from grailnode.config import Config
from grailnode.node.bodies import publish_beacon
from grailnode.node.node_makers import make_node
from grailnode.node.process_launch import Launch
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
from roles.trainer.spool import newest_published_version
from tests.support.builders.snapshots import put_snapshot

_POLL_SECONDS = 0.1


def weights_of(version: int, pair: Weights, tensors: int) -> Weights:
    """Return the weights of a version: `tensors` tensors that have the same rows in different rotations.

    Each element is that of `pair["before"]` or of `pair["after"]`, drawn anew for each version. Therefore half of the
    elements in which the two differ change from one version to the next, and all patches are different.
    """
    generator = torch.Generator().manual_seed(version)
    takes_after = torch.rand(pair["before"].shape, generator=generator) < 0.5
    new_elements = torch.where(takes_after, pair["after"], pair["before"])
    return {f"layer-{number}": torch.roll(new_elements, 37 * number, 0).contiguous() for number in range(tensors)}


async def publish(config: Config, pair: Path, tensors: int) -> None:
    """Publish each version when its file appears; never return."""
    node = make_node(config, "trainer", _telemetry(config, "trainer"))
    views = safetensors.read(pair.read_bytes())
    await node.publish(paths.run(node.run_id), config.at(config.run.manifest).read_bytes())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(publish_beacon, node, Launch(config, "beacon", "trainer"))
        nursery.start_soon(run_publisher, node, PublisherSettings(anchor_interval=1 << 20))
        for version in range(1 << 20):
            while not config.at(Path(f"go-{version}")).exists():
                await trio.sleep(_POLL_SECONDS)
            await put_snapshot(node.state, version, weights_of(version, views, tensors))
            node.telemetry.event("snapshot", version=version)
            while await newest_published_version(node.state) < version:
                await trio.sleep(_POLL_SECONDS)


async def follow(config: Config, name: str) -> None:
    """Follow the chain; never return."""
    node = make_node(config, name, _telemetry(config, name))
    follower = await Follower(node).open()
    while True:
        try:
            await _follow_head(node, follower)
        except (StoreError, ProtocolError) as error:
            node.telemetry.event("cannot-follow", error=str(error))
        await trio.sleep(_POLL_SECONDS)


async def _follow_head(node: Node, follower: Follower) -> None:
    """Apply the version of the head if it is new. `refresh` downloads patches; `rebuild` applies them and downloads
    anchors.
    """
    await follower.refresh()
    head, newest = follower.chain.head, follower.newest
    if head is not None and (newest is None or newest.version < head.version):
        start_time = trio.current_time()
        weights = await follower.rebuild(head.version)
        seconds = trio.current_time() - start_time
        node.telemetry.event(
            "verified", version=weights.version, weights=weights.digest.hex(), apply_seconds=round(seconds, 3)
        )


def _telemetry(config: Config, name: str) -> NodeTelemetry:
    return NodeTelemetry(name, config.at(config.node.logs) / f"{name}.jsonl")


def main() -> None:
    """Run the publisher or a follower."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=["publish", "follow"], help="what the node does")
    parser.add_argument("run", help="the node's run.toml")
    parser.add_argument("--name", default="", help="name of the follower's node")
    parser.add_argument("--pair", type=Path, help="safetensors file with the publisher's tensors `before` and `after`")
    parser.add_argument("--tensors", type=int, default=1, help="number of tensors of the policy")
    arguments = parser.parse_args()
    config = open_config(arguments.run)
    if arguments.role == "publish":
        trio.run(publish, config, arguments.pair, arguments.tensors)
    else:
        trio.run(follow, config, arguments.name)


if __name__ == "__main__":
    main()
