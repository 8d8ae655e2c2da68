"""Version 0 of a run: the weights with which a trainer begins."""

from collections.abc import Callable

from protocol.digest import Weights, digest_weights
from protocol.errors import ChainError
from protocol.quantization import quantize
from protocol.run import RunManifest
from roles.node.identity import Node
from roles.trainer.spool import SnapshotName, put_snapshot
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


async def put_genesis(node: Node, genesis: Callable[[], Weights], shard_bytes: int = SHARD_BYTES) -> None:
    """Put version 0 into the outbox."""
    weights = dict(await node.run_sync(checked_genesis, node.run, genesis))
    await put_snapshot(node.state, SnapshotName(0, 0), TensorSource.of(weights), node.run_sync, shard_bytes)
    await node.run_sync(weights.clear)  # on the event loop, giving back the memory takes long
