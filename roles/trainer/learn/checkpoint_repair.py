"""Rebuilds the checkpoint of the training process from the newest weights (docs/state.md)."""

from dataclasses import replace

from protocol.limits import MAX_SHARD_BYTES
from roles.ports import LineReporter, NotFoundError, ObjectStore
from roles.trainer.learn.checkpoint_file import CheckpointFile
from roles.trainer.learn.training import CHECKPOINT
from roles.trainer.spool import newest_weights


async def repair_checkpoint(state: ObjectStore, say: LineReporter) -> None:
    """Make the checkpoint fit the chain and the outbox, which are whole.

    A checkpoint that is lost, or older than the newest weights, is made from these: masters are the published weights,
    the moments begin at zero, the warm-up starts again, and the replay buffer is empty.

    Raises:
        StoreError, ProtocolError: the state cannot be read.
    """
    newest = await newest_weights(state)
    if newest is None or newest[0] == 0:
        await state.delete(CHECKPOINT)  # training begins with the genesis weights
        return
    version, weights = newest
    try:
        checkpoint = CheckpointFile.decode(await state.get(CHECKPOINT, MAX_SHARD_BYTES))
    except NotFoundError:
        checkpoint = None
    if checkpoint is None or checkpoint.version < version:
        await state.put(CHECKPOINT, CheckpointFile.from_weights(version, weights).encode())
        say(f"{CHECKPOINT}: made from version {version}; moments and waiting groups are lost, the warm-up starts again")
    elif checkpoint.version > version + 1:
        await state.put(CHECKPOINT, replace(checkpoint, version=version + 1).encode())
        say(f"{CHECKPOINT}: becomes version {version + 1}, since the versions before it are lost")
