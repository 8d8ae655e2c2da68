"""Masters and moments in files: each rank writes its own rows, and any number of ranks reads them.

    {folder}{rank}/{number}   a rank's rows of all tensors (roles/trainer/tensor_shards.py)

A tensor is divided along its first dimension, as `fully_shard` does: rank r of R has rows r*c to (r+1)*c with
c = ceil(rows / R), and the last ranks may have fewer, or none. The ranks of one host share the state of that host.
Where each rank finds what it had written, nothing is sent. Otherwise one rank that finds a part sends it to all.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from roles.ports import ObjectStore, StateError
from roles.trainer.learn.optimizer import MASTER
from roles.trainer.tensor_shards import RunSync, ShardReader, TensorSource, put_shards, shard_path

_PLACE: Final = "checkpoints/ of this node's state"
_FOREIGN: Final = "a saved state of another model or optimizer"


@dataclass(frozen=True)
class Share:
    """The part of every tensor that one of several ranks has."""

    rank: int = 0
    count: int = 1

    def rows(self, rows: int) -> slice:
        """Return which of a tensor's rows these are."""
        most = -(-rows // self.count)
        return slice(min(self.rank * most, rows), min((self.rank + 1) * most, rows))


@dataclass(frozen=True)
class SavedRows:
    """Where a saved state is: `parts` has the number of files that each rank wrote."""

    folder: str
    parts: tuple[int, ...]
    steps: int  # optimizer steps; after none there may be masters alone, and moments are zero

    def part(self, rank: int) -> str:
        """Return the folder of a rank's files."""
        return part_folder(self.folder, rank)


def part_folder(folder: str, rank: int) -> str:
    return f"{folder}{rank:05d}/"


class Peers(Protocol):
    """All ranks. Each of them has to make the same calls."""

    def exchange(self, message: Any) -> list[Any]:
        """Return the messages of all ranks, in their order."""

    def send(self, message: Any, source: int) -> Any:
        """Return the message of one rank."""


class StateRows:
    """The rows of masters and moments that this process has, of whole tensors with these shapes, by name."""

    def __init__(self, tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], share: Share) -> None:
        self._tensors = tensors
        self._rows = {name: shape[0] if shape else 1 for name, shape in shapes.items()}
        self._share = share

    def source(self) -> TensorSource:
        """Return the rows. They are not copied on a CPU: no update may run while they are read."""
        tensors = self._tensors
        sizes = {name: tensor.nbytes for name, tensor in tensors.items() if tensor.nbytes}
        return TensorSource(sizes, lambda names: {name: tensors[name].cpu().contiguous() for name in names})

    async def save(self, state: ObjectStore, folder: str, run_sync: RunSync, shard_bytes: int) -> int:
        """Write this rank's part below a folder; return how many files it has."""
        return await put_shards(state, part_folder(folder, self._share.rank), self.source(), run_sync, shard_bytes)

    async def load(self, state: ObjectStore, saved: SavedRows, run_sync: RunSync, peers: Peers | None = None) -> None:
        """Take over the rows of a saved state; with peers, all of them load it at the same time. StateError if it is
        that of another model or optimizer, or a part of it is on no host.
        """
        rank, parts = self._share.rank, range(len(saved.parts))
        own = [await is_whole(state, saved, part) for part in parts]
        present: list[list[bool]] = [own] if peers is None else await run_sync(peers.exchange, own)
        in_place = len(present) == len(parts) and all(present[part][part] for part in parts)
        element_counts: Counter[str] = Counter()
        for part in (rank,) if in_place else parts:
            holder = next((holder for holder, there in enumerate(present) if there[part]), None)
            if holder is None:
                raise StateError(saved.part(part), "not in the state of this host, nor of another that has joined")
            reader = ShardReader(state, saved.part(part), range(saved.parts[part]), run_sync)
            for _ in range(saved.parts[part]):
                shard = [await reader.next_shard() if in_place or holder == rank else None]
                if peers is not None and not in_place:
                    shard = [await run_sync(peers.send, shard.pop(), holder)]
                element_counts += await run_sync(self.take, shard[0], Share(part, len(parts)))
                await run_sync(shard.clear)  # to give memory back takes long on an event loop
        for name, tensor in self._tensors.items():
            incomplete = element_counts[name] < tensor.numel()
            if incomplete and (saved.steps > 0 or name.startswith(MASTER)):
                raise StateError(_PLACE, _FOREIGN)

    def take(self, tensors: Mapping[str, Tensor], part: Share) -> Counter[str]:
        """Copy what this rank has of another part; return how many elements of each tensor these are. StateError if
        they are those of another model or optimizer.
        """
        element_counts: Counter[str] = Counter()
        for name, tensor in tensors.items():
            if name not in self._tensors or tensor.dtype != self._tensors[name].dtype:
                raise StateError(_PLACE, _FOREIGN)
            own, new = (one if one.ndim else one.view(1) for one in (self._tensors[name], tensor))
            mine, theirs = self._share.rows(self._rows[name]), part.rows(self._rows[name])
            if new.shape != (theirs.stop - theirs.start, *own.shape[1:]):
                raise StateError(_PLACE, _FOREIGN)
            first, last = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
            if first < last:
                target = own[first - mine.start : last - mine.start]
                element_counts[name] = target.copy_(new[first - theirs.start : last - theirs.start]).numel()
        return element_counts


async def is_whole(state: ObjectStore, saved: SavedRows, part: int) -> bool:
    """Return whether all files of a rank's part are in a state."""
    paths = {item.path async for item in state.list(saved.part(part))}
    return paths >= {shard_path(saved.part(part), number) for number in range(saved.parts[part])}
