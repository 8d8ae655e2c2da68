"""Rebuilds the checkpoint of the training process from the newest weights (docs/guide/operate.md)."""

from collections.abc import Sequence
from contextlib import suppress

import torch

from protocol.digest import Weights
from protocol.quantization import SCALE, dequantize, is_scale
from roles.ports import LineReporter, NotFoundError, ObjectStore
from roles.trainer.learn.checkpoint_files import (
    NOTES,
    CheckpointNote,
    delete_checkpoints,
    get_replay,
    newest_checkpoint,
    put_checkpoint,
)
from roles.trainer.learn.optimizer import MASTER
from roles.trainer.spool import newest_weights, weights_folder
from roles.trainer.tensor_shards import SHARD_BYTES, TensorSource, read_tensors, run_inline


async def repair_checkpoint(
    state: ObjectStore, say: LineReporter, *, chain_is_rebuilt: bool, is_rewound: bool = False
) -> None:
    """Make the checkpoint fit the chain and the outbox, which are whole.

    A checkpoint that is lost is made from the newest weights, and so is one that is older than these where the chain
    was rebuilt, because the state may be that of an old backup: masters are the published weights, the moments begin at
    zero, the warm-up starts again, and the replay buffer is empty. So is one of versions that the roots took back.
    """
    newest = await newest_weights(state)
    note = await _whole_checkpoint(state)
    if newest is None or newest[0] == 0:
        await delete_checkpoints(state, None)  # training begins with the genesis weights
        return
    version, shards = newest
    if note is None or is_rewound or (chain_is_rebuilt and note.version < version):
        await delete_checkpoints(state, None)
        source = _masters(await read_tensors(state, weights_folder(version), shards))
        await put_checkpoint(state, (version, 0), source, {}, run_inline, SHARD_BYTES)
        say(f"{NOTES}: made from version {version}; moments and waiting groups are lost, the warm-up starts again")
    elif note.version > version + 1:
        next_note = note.model_copy(update={"version": version + 1})
        await state.put(next_note.path, next_note.to_bytes())
        say(f"{note.path}: becomes version {version + 1}, since the versions before it are lost")


async def _whole_checkpoint(state: ObjectStore) -> CheckpointNote | None:
    """Return the newest checkpoint if no file of it is lost."""
    note = await newest_checkpoint(state)
    if note is None:
        return None
    with suppress(NotFoundError):
        await get_replay(state, note, run_inline)
        if len([item async for item in state.list(note.folder)]) == note.shards + 1:
            return note
    return None


def _masters(weights: Weights) -> TensorSource:
    """Return the weights of a version as masters in float32, which are made when they are read."""

    def read(names: Sequence[str]) -> Weights:
        weight_names = [name.removeprefix(MASTER) for name in names]
        tensors = {part: weights[part] for name in weight_names for part in (name, name + SCALE) if part in weights}
        return {MASTER + name: tensor for name, tensor in dequantize(tensors, torch.float32).items()}

    sizes = {MASTER + name: 4 * tensor.numel() for name, tensor in weights.items() if not is_scale(name, weights)}
    return TensorSource(sizes, read)
