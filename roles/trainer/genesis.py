"""Version 0 of a run, with which a trainer begins, and the version from which it goes on."""

from collections.abc import Callable

from protocol.digest import Weights, digest_weights
from protocol.errors import ChainError
from protocol.quantization import quantize
from protocol.run import RunManifest
from roles.node.identity import Node
from roles.trainer.spool import SnapshotName, delete_unnamed_weights, next_version, put_snapshot
from roles.trainer.tensor_shards import SHARD_BYTES, TensorSource


def checked_genesis(run: RunManifest, genesis: Callable[[], Weights]) -> Weights:
    """Return the weights of version 0 as they are published.

    Raises:
        ChainError: they are not those that the run manifest names.
    """
    weights = quantize(genesis(), run.precision)
    if digest_weights(weights) != run.model.genesis:
        raise ChainError("this policy is not the genesis that the run names; use the one it was founded with", "policy")
    return weights


async def begin_versions(node: Node, genesis: Callable[[], Weights], shard_bytes: int = SHARD_BYTES) -> int:
    """Return the newest version that is published or in the outbox, and delete what a crash left of later ones.

    If there is none, this puts version 0 into the outbox.
    """
    newest = await next_version(node.state) - 1
    await delete_unnamed_weights(node.state, newest)
    if newest >= 0:
        return newest
    weights = dict(await node.run_sync(checked_genesis, node.run, genesis))
    await put_snapshot(node.state, SnapshotName(0, 0), TensorSource.of(weights), node.run_sync, shard_bytes)
    await node.run_sync(weights.clear)  # on the event loop, giving back the memory takes long
    return 0
