"""What a host does for a version: it encodes and uploads the files of weights that are in its state.

On one host these are all files. On several each has a range of them, and the publisher of host 0 joins what they
answer: it has the bytes of every part of a patch when it signs their digests. Each call may be repeated. What hosts
have encoded becomes the weights and the patch of a version here, too (`VersionWeights`, `build_patch`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import trio

from protocol import patch, paths
from protocol.digest import Weights, outline, weights_digest
from protocol.encoding import content_digest
from protocol.errors import PatchError
from protocol.limits import MAX_SHARD_BYTES
from protocol.objects import ObjectRef
from protocol.patch import EncodedTensor, Mode, PatchEncoder, check_frames
from protocol.patch.container import TensorRow
from roles.gather import STORAGE_ERRORS
from roles.node.identity import Node
from roles.ports import StoreError
from roles.records import fetch_object
from roles.trainer.spool import stored_versions, weights_folder
from roles.trainer.tensor_shards import ShardReader, WeightsHash, delete_below, shard_path


@dataclass(frozen=True)
class VersionWeights:
    """The weights of a version, whose data are on the disk."""

    outline: Weights  # dtypes and shapes
    digest: bytes  # of all weights

    @classmethod
    def of(cls, tensors: Mapping[str, EncodedTensor]) -> Self:
        """Return the weights that encoded tensors lead to."""
        shapes = outline({name: (item.row.dtype, item.row.shape) for name, item in tensors.items()})
        return cls(shapes, weights_digest({name: item.after for name, item in tensors.items()}, shapes))


def unchanged(weights: Weights, digests: Mapping[str, bytes]) -> dict[str, EncodedTensor]:
    """Return tensors with their digests as if they were those of the version before."""
    rows = [TensorRow(name, item.dtype, tuple(item.shape), Mode.UNCHANGED, 0, 0, b"") for name, item in weights.items()]
    return {row.name: EncodedTensor(row, memoryview(b""), *[digests[row.name]] * 2) for row in rows}


def build_patch(tensors: Mapping[str, EncodedTensor], profile: str, base: bytes) -> bytes:
    """Return the patch from weights with a digest, of tensors that hosts have encoded and checked."""
    encoder = patch.PatchEncoder(profile)
    encoder.tensors.update(tensors)
    data = encoder.finish()
    # The frames were decoded by the hosts; what remains is what followers read first, the digests at both ends.
    patch.check_container(data, tensors, base, VersionWeights.of(tensors).digest)
    return data


def reference(data: bytes) -> ObjectRef:
    """Return the digest and size by which a manifest names an object."""
    return ObjectRef(digest=content_digest(data), size=len(data))


@dataclass(frozen=True)
class Base:
    """The published version from which a patch leads."""

    version: int
    files: int  # of its weights, on all hosts
    anchor: tuple[ObjectRef, ...]  # the same files in storage; empty if they are not there
    needed_versions: Collection[int] = ()  # earlier ones whose anchors are not complete


@dataclass(frozen=True)
class EncodedFiles:
    """What a host has made of its files of a version; without a base each tensor counts as unchanged."""

    tensors: Mapping[str, EncodedTensor]
    files: int  # that the host has
    encode_seconds: float = 0.0
    apply_seconds: float = 0.0

    def frames(self) -> bytes:
        """Return the frames as they stand in the patch."""
        return b"".join(self.tensors[name].frame for name in sorted(self.tensors))


class HostFiles:
    """The files of this host, published in the space of a public key; `threads` tensors are encoded at a time."""

    def __init__(self, node: Node, key: bytes, profile: str = "compact", threads: int = 1, attempts: int = 3) -> None:
        self._node, self._key = node, key
        self._profile, self._threads, self._attempts = profile, threads, attempts
        self._newest = EncodedFiles({}, 0)
        self._known: tuple[int, Sequence[int]] = -1, ()  # the version and files whose digests these are
        self._digests: Mapping[str, bytes] = {}

    async def numbers(self, version: int) -> list[int]:
        """Return the numbers of a version's files that are here, ascending."""
        folder = weights_folder(version)
        return [int(item.path.removeprefix(folder)) async for item in self._node.state.list(folder)]

    async def encode(self, version: int, base: Base | None) -> EncodedFiles:
        """Encode and check the changes of this host's tensors, or without a base compute their digests alone.
        PatchError if the codec is at fault, or the base's files are neither here nor in storage.
        """
        run_sync, numbers, self._newest = self._node.run_sync, await self.numbers(version), EncodedFiles({}, 0)
        old_reader = None if base is None else await self._open_base(base, numbers)
        encoder, own = PatchEncoder(self._profile, threads=self._threads), WeightsHash()
        reader = self._reader(version, numbers)
        known, encode_seconds, apply_seconds = {"base_digests": self._digests, "digests": own.digests}, 0.0, 0.0
        while (new := await reader.next_shard()) is not None:
            old = {} if old_reader is None else await old_reader.take(new.keys())
            began = trio.current_time()
            await run_sync(own.add, new)
            if old_reader is None:
                encoder.tensors.update(unchanged(new, own.digests))
            else:
                if old.keys() != new.keys():
                    raise PatchError("the files of the version before are cut otherwise", f"version {version}")
                await run_sync(partial(encoder.add, old, new, **known))
                encode_seconds += trio.current_time() - began
                began = trio.current_time()
                await run_sync(check_frames, old, new, encoder.tensors)  # decoded, as every follower will
                apply_seconds += trio.current_time() - began
            for tensors in (new, old):
                await run_sync(tensors.clear)  # to give memory back takes long on an event loop
        self._newest = EncodedFiles(encoder.tensors, len(numbers), encode_seconds, apply_seconds)
        self._known, self._digests = (version, numbers), own.digests
        return self._newest

    def _reader(self, version: int, numbers: Sequence[int]) -> ShardReader:
        return ShardReader(self._node.state, weights_folder(version), numbers, self._node.run_sync)

    async def _open_base(self, base: Base, numbers: Sequence[int]) -> ShardReader:
        """Return a reader of the base's tensors, whose digests are known then; delete the versions before it.

        The base's files are on another host after the genesis weights, a repair, or a start with other hosts.
        """
        node, own = self._node, await self.numbers(base.version)
        if len(own) < base.files:  # else this host has all, which may be cut otherwise
            for number in sorted({*numbers} - {*own}):
                path = shard_path(weights_folder(base.version), number)
                if not number < len(base.anchor) == base.files:
                    raise PatchError("neither on this host nor in an anchor, so a patch cannot begin there", path)
                ref = base.anchor[number]
                try:
                    file = await fetch_object(node, paths.anchor(self._key, ref.digest), ref)
                except STORAGE_ERRORS as error:
                    raise PatchError(f"not on this host, and not to be read from storage: {error}", path) from error
                await node.state.put(path, file)
            own = [*numbers]
        for version in sorted(await stored_versions(node.state)):
            if version < base.version and version not in base.needed_versions:
                await delete_below(node.state, weights_folder(version))
        if self._known != (base.version, own):
            hashes, reader = WeightsHash(), self._reader(base.version, own)
            while (tensors := await reader.next_shard()) is not None:
                await node.run_sync(hashes.add, tensors)
            self._known, self._digests = (base.version, own), hashes.digests
        return self._reader(base.version, own)

    async def put_part(self, offset: int, ref: ObjectRef) -> bool:
        """Upload the newest patch's part at an offset in this host's frames; return whether storage shows it."""
        part = self._newest.frames()[offset : offset + ref.size]  # others, if this process has started since
        return await self._node.run_sync(reference, part) == ref and await self.upload_part(part, ref)

    async def upload_part(self, part: bytes, ref: ObjectRef) -> bool:
        """Upload a part of a patch; return whether one of the attempts succeeded."""
        path = paths.patch(self._key, ref.digest)
        for _ in range(self._attempts):
            try:
                await self._node.store.put(path, part)
            except StoreError as error:
                self._node.telemetry.event("put-failed", path=path, error=str(error))
            else:
                if await self._node.is_readable(path, part):
                    return True
        return False

    async def references(self, version: int) -> Mapping[int, ObjectRef]:
        """Return the references to this host's files of a version, by number."""
        refs = dict[int, ObjectRef]()
        for number in await self.numbers(version):
            file = [await self._node.state.get(shard_path(weights_folder(version), number), MAX_SHARD_BYTES)]
            refs[number] = await self._node.run_sync(reference, file[0])
            await self._node.run_sync(file.clear)  # to give memory back takes long on an event loop
        return refs

    async def put_files(self, version: int, anchor: Sequence[ObjectRef]) -> Sequence[int]:
        """Upload this host's files as shards of a version's anchor, one after the other; return their numbers."""
        numbers = await self.numbers(version)
        for number in numbers:
            file = [await self._node.state.get(shard_path(weights_folder(version), number), anchor[number].size)]
            await self._node.publish(paths.anchor(self._key, anchor[number].digest), file[0])
            await self._node.run_sync(file.clear)
        return numbers
