"""The checkpoints of the training process, in the node's state.

    checkpoints/{step}/{number}   masters and moments (roles/trainer/tensor_shards.py)
    checkpoints/{step}/replay     the replay buffer (safetensors)
    training/{step}               a note that these are complete, of which version, and how many they are

The note is written last and deleted first, so a checkpoint is there whole or not at all. There is no more than one in
memory at any time: masters and moments are written from where training has them, one file after the other.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

from pydantic import Field
from torch import Tensor

from protocol.chain import safetensors
from protocol.encoding import Record, Version
from protocol.limits import MAX_SHARD_BYTES
from roles.ports import ObjectStore
from roles.trainer.tensor_shards import RunSync, ShardReader, TensorSource, delete_shards, put_shards

NOTES: Final = "training/"
CHECKPOINTS: Final = "checkpoints/"


class CheckpointNote(Record):
    """A note of a complete checkpoint.

    Attributes:
        version: the version whose snapshot was taken at the same moment.
        step: optimizer steps up to it.
        shards: how many files masters and moments have. At step 0 the moments are not there: they are zero.
    """

    kind: ClassVar[str] = "checkpoint"
    max_bytes: ClassVar[int] = 1 << 12
    version: Version
    step: Annotated[int, Field(ge=0, lt=1 << 53)]
    shards: Annotated[int, Field(ge=1)]

    @property
    def folder(self) -> str:
        """The folder of its files."""
        return f"{CHECKPOINTS}{self.step:012d}/"

    @property
    def path(self) -> str:
        """The path of the note."""
        return f"{NOTES}{self.step:012d}"

    def reader(self, state: ObjectStore, run_sync: RunSync) -> ShardReader:
        """Return a reader of masters and moments."""
        return ShardReader(state, self.folder, self.shards, run_sync)


async def newest_checkpoint(state: ObjectStore) -> CheckpointNote | None:
    """Return the note of the checkpoint of the newest version; None if there is none."""
    paths = [item.path async for item in state.list(NOTES)]
    notes = [CheckpointNote.from_bytes(await state.get(path, CheckpointNote.max_bytes)) for path in paths]
    return max(notes, key=lambda note: note.version, default=None)


async def put_checkpoint(
    state: ObjectStore,
    moment: tuple[int, int],
    source: TensorSource,
    replay: Mapping[str, Tensor],
    run_sync: RunSync,
    shard_bytes: int,
) -> None:
    """Write a checkpoint, then delete the older ones.

    Args:
        moment: the version and the optimizer step.
        source: masters and moments, which do not change before this returns.
        replay: the state of the replay buffer; empty for a buffer without groups.
    """
    version, step = moment
    folder = CheckpointNote(version=version, step=step, shards=1).folder
    count = await put_shards(state, folder, source, run_sync, shard_bytes)
    await state.put(f"{folder}replay", await run_sync(safetensors.write, replay))
    note = CheckpointNote(version=version, step=step, shards=count)
    await state.put(note.path, note.to_bytes())
    await delete_checkpoints(state, note)


async def get_replay(state: ObjectStore, note: CheckpointNote, run_sync: RunSync) -> Mapping[str, Tensor]:
    """Return the state of the replay buffer in a checkpoint."""
    data = await state.get(f"{note.folder}replay", MAX_SHARD_BYTES)
    replay: Mapping[str, Tensor] = await run_sync(safetensors.read, data)
    return replay


async def delete_checkpoints(state: ObjectStore, newest: CheckpointNote | None) -> None:
    """Delete all checkpoints but one, and what a crash left of incomplete ones."""
    for path in [item.path async for item in state.list(NOTES)]:
        if newest is None or path != newest.path:
            await state.delete(path)
    folders = {item.path[: item.path.rindex("/") + 1] async for item in state.list(CHECKPOINTS)}
    for folder in sorted(folders - ({newest.folder} if newest else set())):
        await delete_shards(state, folder)
