"""Tensors in a node's own state, as files of a bounded size: only one of them is in memory at a time.

    {folder}{number}    a safetensors file of some tensors, in order of name

A shard has at most `shard_bytes` bytes of tensors, or one tensor that is larger. Other objects say that a folder is
complete; until then its files may be replaced.
"""

from collections.abc import Awaitable, Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from protocol.chain import safetensors
from protocol.digest import Weights, outline, tensor_digest, weights_digest
from protocol.limits import MAX_SHARD_BYTES
from roles.ports import ObjectStore

SHARD_BYTES = 1 << 25

RunSync = Callable[..., Awaitable[Any]]
"""Runs a function that computes for long, off the event loop's thread."""


@dataclass(frozen=True)
class TensorSource:
    """Tensors that are read some at a time."""

    sizes: Mapping[str, int]  # bytes of each tensor
    read: Callable[[Sequence[str]], Weights]  # returns the tensors of some names: contiguous, on the CPU

    @classmethod
    def of(cls, weights: Weights) -> "TensorSource":
        """Return the source of tensors that are in memory."""
        sizes = {name: tensor.nbytes for name, tensor in weights.items()}
        return cls(sizes, lambda names: {name: weights[name] for name in names})

    def file(self, names: Sequence[str]) -> bytes:
        """Return some of the tensors as a safetensors file."""
        return safetensors.write(self.read(names))

    async def put_version(
        self, state: ObjectStore, folder: str, run_sync: RunSync, shard_bytes: int = SHARD_BYTES
    ) -> "WrittenWeights":
        """Write the weights into a folder; their digest is computed from the tensors that the files are made of."""
        own = WeightsHash()
        read = TensorSource(self.sizes, lambda names: own.add(self.read(names)))
        return WrittenWeights(await put_shards(state, folder, read, run_sync, shard_bytes), (own.digest(),))


@dataclass(frozen=True)
class WrittenWeights:
    """Weights that are on the disk: how many files they have, and the digest of what each host has written."""

    files: int  # on all hosts
    digests: tuple[bytes, ...]


class VersionSource(Protocol):
    """The weights of a version, on this host or divided among several."""

    async def put_version(
        self, state: ObjectStore, folder: str, run_sync: RunSync, shard_bytes: int
    ) -> WrittenWeights: ...


class WeightsHash:
    """The digest of weights, of which some tensors come at a time."""

    def __init__(self) -> None:
        self._outline: dict[str, tuple[torch.dtype, torch.Size]] = {}
        self.digests: dict[str, bytes] = {}

    def add(self, tensors: Weights) -> Weights:
        """Add tensors, and return them."""
        self._outline |= {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        self.digests |= {name: tensor_digest(tensor) for name, tensor in tensors.items()}
        return tensors

    def digest(self) -> bytes:
        return weights_digest(self.digests, outline(self._outline))


async def put_shards(
    state: ObjectStore, folder: str, source: TensorSource, run_sync: RunSync, shard_bytes: int = SHARD_BYTES
) -> int:
    """Write tensors into a folder (with a slash at its end); return how many files they have."""
    shards = safetensors.shards(source.sizes, shard_bytes)
    for number, names in enumerate(shards):
        file = [await run_sync(source.file, names)]
        await state.put(shard_path(folder, number), file[0])
        await run_sync(file.clear)  # to give memory back takes long on an event loop
    return len(shards)


class ShardReader:
    """Reads the tensors of a folder's files with these numbers, in order of name."""

    def __init__(self, state: ObjectStore, folder: str, numbers: Sequence[int], run_sync: RunSync) -> None:
        self._state = state
        self._folder = folder
        self._numbers = iter(numbers)
        self._run_sync = run_sync
        self._tensors: dict[str, Tensor] = {}  # that were read and not taken yet

    async def next_shard(self) -> dict[str, Tensor] | None:
        """Return the tensors of the next file; None after the last."""
        if (number := next(self._numbers, None)) is None:
            return None
        file = [await self._state.get(shard_path(self._folder, number), MAX_SHARD_BYTES)]
        tensors: dict[str, Tensor] = await self._run_sync(lambda: safetensors.read(file.pop()))
        return tensors

    async def take(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return tensors that follow those that were taken before; without those that the folder does not have."""
        while not self._tensors.keys() >= set(names) and (shard := await self.next_shard()) is not None:
            self._tensors |= shard
        return {name: self._tensors.pop(name) for name in names if name in self._tensors}


async def run_inline(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return a function's result, computed in this task: for repairs and tools, which have nothing else to do."""
    return function(*arguments)


async def read_tensors(state: ObjectStore, folder: str, count: int, run_sync: RunSync = run_inline) -> Weights:
    """Return all tensors of a folder; they are all in memory."""
    reader, tensors = ShardReader(state, folder, range(count), run_sync), dict[str, Tensor]()
    while (shard := await reader.next_shard()) is not None:
        tensors |= shard
    return tensors


async def delete_below(state: ObjectStore, prefix: str, kept: Container[str] = ()) -> None:
    """Delete all objects but some whose paths begin with a prefix, such as a folder's files."""
    for path in [item.path async for item in state.list(prefix) if item.path not in kept]:
        await state.delete(path)


def shard_path(folder: str, number: int) -> str:
    """Return the path of a file of a folder."""
    return f"{folder}{number:05d}"
