"""Snapshots in a trainer's state, written and read at once."""

from collections.abc import Mapping, Sequence

from protocol.chain import safetensors
from protocol.digest import Weights, digest_weights
from roles.ports import ObjectStore
from roles.trainer import spool
from roles.trainer.spool import OUTBOX, WEIGHTS, SnapshotName
from roles.trainer.tensor_shards import SHARD_BYTES, TensorSource, read_tensors, run_inline
from tests.support.simulation.recording_store import Put


async def put_snapshot(
    state: ObjectStore, version: int, weights: Weights, step: int | None = None, shard_bytes: int = SHARD_BYTES
) -> None:
    """Put the weights of a version into the outbox; its step is its version unless it is given."""
    name = SnapshotName(version, version if step is None else step)
    await spool.put_snapshot(state, name, TensorSource.of(weights), run_inline, shard_bytes)


async def get_snapshot(state: ObjectStore, name: SnapshotName) -> Weights:
    """Return the weights of a snapshot in the outbox."""
    count = await spool.count_shards(state, name.path)
    return await read_tensors(state, spool.weights_folder(name.version), count)


def snapshot_views(puts: Sequence[Put]) -> Mapping[int, set[bytes]]:
    """Return the digests of all weights that were handed over as each version, from all puts into a state in order."""
    files: dict[int, dict[str, bytes]] = {}
    views: dict[int, set[bytes]] = {}
    for put in puts:
        if put.path.startswith(WEIGHTS):
            files.setdefault(int(put.path.split("/")[1]), {})[put.path] = put.data
        elif put.path.startswith(OUTBOX):
            version = SnapshotName.parse(put.path).version
            tensors = {
                name: tensor for data in files[version].values() for name, tensor in safetensors.read(data).items()
            }
            views.setdefault(version, set()).add(digest_weights(tensors))
    return views
