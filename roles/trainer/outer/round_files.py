"""What a site or a coordinator keeps of outer rounds in its own state.

    outer/rounds/{number}-{trainer}     signed round manifests
    outer/states/{number}/{place}       the shared state after a round, in shards
    outer/site                          a site's record: which of the files below count
    outer/feedback/{number}/            a site's error feedback, if the manifest of this number counts its contribution
    outer/inner/{number}/               the learner's state after the local steps of a round, likewise
    outer/prepared/{number}             a site's signed contribution; payload and both states are there before it
    outer/payload/{number}/{place}      the files of its payload
    outer/download/{digest}             shards of a state that a site is fetching
    outer/seen/{number}-{worker}        the contribution that a coordinator saw first
    outer/sent/{number}                 projections of the contributions to a round, which a coordinator compares
    outer/pointer                       the round pointer that the coordinator published last

An object is complete or absent. The manifest is the atomic point of a coordinator, which stores projections and state
before it; the prepared contribution is that of a site's sending, and the site's record that of its settling. What these
do not name does not count.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Annotated, ClassVar

import numpy as np
import safetensors.torch
from pydantic import Field
from torch import Tensor

from protocol import limits, paths
from protocol.chain.safetensors import shards
from protocol.encoding import Record
from protocol.errors import MalformedError
from protocol.identity.signing import Digest, Key, Signed
from protocol.outer.comparing import PROJECTED, REMEMBERED_NUMBERS, REMEMBERED_ROUNDS, SentRound, projection_size
from protocol.outer.round_records import OuterNumber, RoundManifest
from protocol.outer.shared_state import SharedState
from protocol.pseudogradient import Part
from roles.node.identity import Node
from roles.ports import NotFoundError, ObjectStore, StateError
from roles.records import open_record
from roles.trainer.tensor_shards import delete_below

OUTER = "outer/"
ROUNDS = "outer/rounds/"
STATES = "outer/states/"
SITE = "outer/site"
FEEDBACK = "outer/feedback/"
INNER = "outer/inner/"
PREPARED = "outer/prepared/"
PAYLOAD = "outer/payload/"
DOWNLOAD = "outer/download/"
SEEN = "outer/seen/"
SENT = "outer/sent/"
POINTER = "outer/pointer"

_SHARD_BYTES = 64 * limits.MIB  # of tensors in a file on this node's disk
_USED_GROUPS = 16 * limits.MAX_ALL_ROUND_GROUPS  # that a site remembers: those of 16 full rounds


class UsedGroup(Record):
    """A group that a manifest named, and the step of the state from which that round started."""

    kind: ClassVar[str] = "used-group"
    group: Digest
    step: OuterNumber


class SiteRecord(Record):
    """Where a site stands."""

    kind: ClassVar[str] = "site"
    max_bytes: ClassVar[int] = 64 * _USED_GROUPS
    max_items: ClassVar[int] = 8 * _USED_GROUPS
    number: OuterNumber  # of the manifest that it applied last
    trainer: Key  # whose space that was in
    feedback: Annotated[int, Field(ge=-1, lt=1 << 33)]  # the number of the file that counts; -1 for none
    inner: Annotated[int, Field(ge=-1, lt=1 << 33)]  # likewise
    used: tuple[UsedGroup, ...]  # as long as a copy of them would not be too stale


class SentContribution(Record):
    """The contribution of one site to a round, reduced to a random projection (protocol/outer/comparing.py)."""

    kind: ClassVar[str] = "sent-contribution"
    worker: Key  # the site's public key
    disagreeing: bool  # with the other contributions to the round
    # the projection, float32 little-endian
    numbers: Annotated[bytes, Field(max_length=4 * PROJECTED)]


class SentRoundRecord(Record):
    """The projections of all contributions to a round, as a coordinator stores them for later rounds (`SentRound`)."""

    kind: ClassVar[str] = "sent-round"
    max_bytes: ClassVar[int] = 4 * REMEMBERED_NUMBERS + 128 * limits.MAX_WORKERS
    stream: Annotated[int, Field(ge=0, lt=limits.MAX_STREAMS)]  # of weights that the contributions change
    # of the sites whose contributions were long enough to be compared
    sent: Annotated[tuple[SentContribution, ...], Field(max_length=limits.MAX_WORKERS)]


def numbered(prefix: str, number: int) -> str:
    """Return the path of an object of a round."""
    return f"{prefix}{number:010d}"


async def put_tensors(node: Node, path: str, tensors: Mapping[str, Tensor]) -> None:
    """Store tensors of any dtype by name in this node's own state, in files of at most `_SHARD_BYTES` or one tensor."""
    await delete_below(node.state, f"{path}/")  # of a process that was killed
    files = shards({name: tensor.nbytes for name, tensor in tensors.items()}, _SHARD_BYTES)
    for place, names in enumerate(files):
        file = [await node.run_sync(safetensors.torch.save, {name: tensors[name] for name in names})]
        await node.state.put(f"{path}/{place:05d}-{len(files):05d}", file[0])
        await node.run_sync(file.clear)  # to give memory back takes long on an event loop


async def get_tensors(node: Node, path: str) -> dict[str, Tensor]:
    """Read tensors of this node's own state by name; StateError if not all files are there."""
    files, tensors = sorted([item.path async for item in node.state.list(f"{path}/")]), dict[str, Tensor]()
    if not files or len(files) != int(files[0].rpartition("-")[2]):
        raise StateError(path, f"has {len(files)} files, which are not all")
    for file in files:
        tensors |= await node.run_sync(safetensors.torch.load, await node.state.get(file, limits.MAX_SHARD_BYTES))
    return tensors


def _round_path(trainer: bytes, number: int) -> str:
    return f"{numbered(ROUNDS, number)}-{trainer.hex()}"


async def put_manifest(state: ObjectStore, signed: Signed[RoundManifest]) -> None:
    """Store a round manifest."""
    await state.put(_round_path(signed.record.trainer, signed.record.number), signed.data)


async def get_manifest(node: Node, trainer: bytes, number: int) -> Signed[RoundManifest]:
    """Read a round manifest of this node's own state."""
    data = await node.state.get(_round_path(trainer, number), RoundManifest.max_signed_bytes())
    return open_record(node, RoundManifest, paths.round_manifest(trainer, number), data)


async def list_manifests(state: ObjectStore) -> list[tuple[int, bytes]]:
    """Return number and trainer of the round manifests of this node's own state, in order."""
    result = []
    async for item in state.list(ROUNDS):
        number, _, trainer = item.path.removeprefix(ROUNDS).partition("-")
        if not number.isdigit():
            raise MalformedError("not the name of a round manifest", item.path)
        result.append((int(number), bytes.fromhex(trainer)))
    return sorted(result)


async def each_shard(node: Node, shared: SharedState, shard_bytes: int) -> AsyncIterator[tuple[int, bytes]]:
    """Yield number and bytes of each shard of a shared state, which a thread makes."""
    numbered_shards = enumerate(shared.shards(shard_bytes))
    while shard := await node.run_sync(next, numbered_shards, None):
        yield shard


async def put_state(node: Node, number: int, shared: SharedState) -> None:
    """Store the shared state after a round in this node's own state."""
    async for place, shard in each_shard(node, shared, _SHARD_BYTES):
        await node.state.put(f"{numbered(STATES, number)}/{place:05d}", shard)


async def get_state(node: Node, manifest: RoundManifest, parts: tuple[Part, ...]) -> SharedState:
    """Read the shared state after a round from this node's own state; NotFoundError if it is not there."""
    prefix = f"{numbered(STATES, manifest.number)}/"
    shard_paths = [item.path async for item in node.state.list(prefix)]
    shards = [await node.state.get(path, _SHARD_BYTES) for path in sorted(shard_paths)]
    if not shards:
        raise NotFoundError(f"{prefix}: no shards")
    shared: SharedState = await node.run_sync(SharedState.from_shards, iter(shards), manifest.state, parts)
    return shared


async def put_sent(state: ObjectStore, number: int, sent: SentRound) -> None:
    """Store the projections of the contributions to a round."""
    rows = zip(sent.workers, sent.projections, strict=True)
    items = tuple(
        SentContribution(worker=worker, disagreeing=worker in sent.disagreeing, numbers=row.astype("<f4").tobytes())
        for worker, row in rows
    )
    await state.put(numbered(SENT, number), SentRoundRecord(stream=sent.stream, sent=items).to_bytes())


async def get_sent(state: ObjectStore, newest: int) -> dict[int, SentRound]:
    """Read the projections of the newest REMEMBERED_ROUNDS rounds, by number; rounds without a file are left out."""
    rounds = {}
    for number in range(max(0, newest + 1 - REMEMBERED_ROUNDS), newest + 1):
        try:
            data = await state.get(numbered(SENT, number), SentRoundRecord.max_bytes)
        except NotFoundError:
            continue
        record = SentRoundRecord.from_bytes(data)
        numbers = np.frombuffer(b"".join(item.numbers for item in record.sent), "<f4").astype(np.float32)
        rounds[number] = SentRound(
            tuple(item.worker for item in record.sent),
            numbers.reshape(len(record.sent), projection_size(len(record.sent))),
            frozenset(item.worker for item in record.sent if item.disagreeing),
            record.stream,
        )
    return rounds


async def delete_except(state: ObjectStore, prefix: str, keep: set[int]) -> None:
    """Delete the objects of all rounds but some below a prefix."""
    for path in [item.path async for item in state.list(prefix)]:
        if int(path.removeprefix(prefix)[:10]) not in keep:
            await state.delete(path)
