"""The checkpoints of the training process, in the node's state, and their repair (docs/guide/operate.md).

    checkpoints/{step}-{nonce}/{rank}/{number}   masters and moments (roles/trainer/learn/state_rows.py)
    checkpoints/{step}-{nonce}/replay            the replay buffer
    training/{step}                              a note that these are complete, of which version, and how many they are

The note is written last and deleted first, so a checkpoint is there whole or not at all. There is no more than one file
in memory at any time: each rank writes masters and moments from where it has them, one file after the other. Ranks on
other hosts write into the state of their host, which has no notes: what the note of rank 0's host names is kept there.
"""

import secrets
from collections.abc import Awaitable, Callable, Sequence, Set
from contextlib import suppress
from typing import Annotated, ClassVar, Final

import torch
from pydantic import Field

from protocol.digest import Weights
from protocol.encoding import Record, Version
from protocol.errors import ProtocolError
from protocol.limits import MAX_SHARD_BYTES
from protocol.outer.dithering import dither
from protocol.quantization import SCALE, dequantize, is_scale
from roles.ports import LineReporter, NotFoundError, ObjectStore, StateError
from roles.trainer.learn.optimizer import MASTER
from roles.trainer.learn.replay_buffer import ReplayBuffer
from roles.trainer.learn.state_rows import SavedRows, is_whole, part_folder
from roles.trainer.learn.training_settings import ReplaySettings
from roles.trainer.spool import newest_weights, weights_folder
from roles.trainer.tensor_shards import TensorSource, delete_below, put_shards, read_tensors, run_inline

NOTES: Final = "training/"
CHECKPOINTS: Final = "checkpoints/"

Save = Callable[[str, str], Awaitable[tuple[Sequence[int], int]]]
"""Writes masters and moments below a folder, given also the folder of the checkpoint before; returns how many files
each rank has written, and how many of the ranks, the first ones, share this state.
"""


class CheckpointNote(Record):
    """A note of a complete checkpoint."""

    kind: ClassVar[str] = "checkpoint"
    max_bytes: ClassVar[int] = 1 << 16
    version: Version  # whose snapshot was taken at the same moment
    step: Annotated[int, Field(ge=0, lt=1 << 53)]  # optimizer steps up to it
    parts: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]  # each rank's number of files
    local_parts: Annotated[int, Field(ge=1)]  # how many of them, the first ones, are in this state
    # No two attempts share a folder: a host may still have files of another one that reached the same step.
    nonce: Annotated[int, Field(ge=0, lt=1 << 53)]

    @property
    def folder(self) -> str:
        return checkpoint_folder(self.step, self.nonce)

    @property
    def path(self) -> str:
        return f"{NOTES}{self.step:012d}"

    @property
    def rows(self) -> SavedRows:
        return SavedRows(self.folder, self.parts, self.step)


def checkpoint_folder(step: int, nonce: int) -> str:
    return f"{CHECKPOINTS}{step:012d}-{nonce:014x}/"


async def newest_checkpoint(state: ObjectStore) -> CheckpointNote | None:
    """Return the note of the checkpoint of the newest version; None if there is none. StateError for another format."""
    notes = []
    for path in [item.path async for item in state.list(NOTES)]:
        try:
            notes.append(CheckpointNote.from_bytes(await state.get(path, CheckpointNote.max_bytes)))
        except ProtocolError as error:
            raise StateError(path, f"not a checkpoint of this version of the program ({error})") from error
    return max(notes, key=lambda note: note.version, default=None)


async def put_checkpoint(state: ObjectStore, moment: tuple[int, int], save: Save, replay: bytes) -> None:
    """Write a checkpoint of a version and an optimizer step, then delete the older ones. Masters and moments do not
    change before this returns.
    """
    version, step = moment
    previous, nonce = await newest_checkpoint(state), secrets.randbits(53)
    folder = checkpoint_folder(step, nonce)
    parts, local_parts = await save(folder, previous.folder if previous else "")
    await state.put(f"{folder}replay", replay)
    note = CheckpointNote(version=version, step=step, parts=tuple(parts), local_parts=local_parts, nonce=nonce)
    await state.put(note.path, note.to_bytes())
    await delete_checkpoints(state, note)


async def get_replay(state: ObjectStore, note: CheckpointNote) -> bytes:
    """Return the state of the replay buffer in a checkpoint; empty if it has none."""
    return await state.get(f"{note.folder}replay", MAX_SHARD_BYTES)


async def delete_checkpoints(state: ObjectStore, newest: CheckpointNote | None) -> None:
    """Delete all checkpoints but one, and what a crash left of incomplete ones."""
    await delete_below(state, NOTES, () if newest is None else (newest.path,))
    await delete_folders(state, {newest.folder} if newest else set())


async def delete_folders(state: ObjectStore, kept: Set[str]) -> None:
    """Delete the files of all checkpoints but some."""
    folders = {f"{CHECKPOINTS}{item.path.split('/')[1]}/" async for item in state.list(CHECKPOINTS)}
    for folder in sorted(folders - kept):
        await delete_below(state, folder)


async def repair_checkpoint(
    state: ObjectStore, say: LineReporter, *, chain_is_rebuilt: bool, is_rewound: bool = False
) -> None:
    """Make the checkpoint fit the chain and the outbox, which are whole.

    A checkpoint that is lost is made from the newest weights, and so is one that is older than these where the chain
    was rebuilt, because the state may be that of an old backup: the published weights are the rounding of the masters,
    the moments begin at zero, the warm-up starts again, and the replay buffer is empty. So is one of versions
    that the roots took back. Where only the replay buffer cannot be read, it becomes empty.
    """
    newest = await newest_weights(state)
    note = await whole_checkpoint(state)
    if newest is None or newest[0] == 0:
        await delete_checkpoints(state, None)  # training begins with the genesis weights
        return
    version, shards = newest
    if note is None or is_rewound or (chain_is_rebuilt and note.version < version):
        await delete_checkpoints(state, None)
        source = _masters(await read_tensors(state, weights_folder(version), shards))

        async def save(folder: str, _previous: str) -> tuple[Sequence[int], int]:
            return [await put_shards(state, part_folder(folder, 0), source, run_inline)], 1

        await put_checkpoint(state, (version, 0), save, b"")
        say(f"{NOTES}: made from version {version}; moments and waiting groups are lost, the warm-up starts again")
        return
    if note.version > version + 1:
        next_note = note.model_copy(update={"version": version + 1})
        await state.put(next_note.path, next_note.to_bytes())
        say(f"{note.path}: becomes version {version + 1}, since the versions before it are lost")
    try:
        if replay := await get_replay(state, note):
            ReplayBuffer(ReplaySettings(), 0).restore(replay)
    except (NotFoundError, ValueError):
        await state.put(f"{note.folder}replay", b"")
        say(f"{note.folder}replay: cannot be read; the groups that waited are lost")


async def whole_checkpoint(state: ObjectStore) -> CheckpointNote | None:
    """Return the newest checkpoint if no masters or moments of it are lost, and its note can be read."""
    with suppress(NotFoundError, StateError):
        note = await newest_checkpoint(state)
        if note is None:
            return None
        if all([await is_whole(state, note.rows, part) for part in range(note.local_parts)]):
            return note
    return None


def _masters(weights: Weights) -> TensorSource:
    """Return float32 masters of which a version's weights are the rounding; they are made when they are read."""
    is_quantized = any(is_scale(name, weights) for name in weights)

    def read(names: Sequence[str]) -> Weights:
        weight_names = [name.removeprefix(MASTER) for name in names]
        tensors = {part: weights[part] for name in weight_names for part in (name, name + SCALE) if part in weights}
        masters = dequantize(tensors, torch.float32).items()
        return {MASTER + name: master if is_quantized else dither(name, master) for name, master in masters}

    sizes = {MASTER + name: 4 * tensor.numel() for name, tensor in weights.items() if not is_scale(name, weights)}
    return TensorSource(sizes, read)
