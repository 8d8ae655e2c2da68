"""How a site reads rounds from storage: round manifests, the payloads that they name, and whole states; and what it
deletes from its own space when a round is over.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Final

import trio

from protocol import paths
from protocol.errors import ForkError, ProtocolError
from protocol.identity.signing import Signed
from protocol.objects import ObjectRef
from protocol.outer.round_records import (
    CountedContribution,
    PayloadRef,
    PlannedContribution,
    RoundManifest,
    RoundPointer,
)
from protocol.outer.shared_state import SharedState
from protocol.pseudogradient import File, Keep, Part, Payload, read_head
from roles.gather import STORAGE_ERRORS, answer_of, first_failure, first_success, gather
from roles.node.identity import Node
from roles.ports import NotFoundError, StoreError
from roles.records import FOREIGN, fetch_object, fetch_record
from roles.trainer.outer.round_files import DOWNLOAD

_AT_ONCE = 4  # downloads

HEAD_START: Final = 5.0
HEAD_START_BYTES: Final = 10_000_000
"""Seconds, and bytes a second, that a worker's space has before the trainer's copy of a file is fetched as well."""


@dataclass(frozen=True)
class FetchedFiles:
    """The files of a round's payloads that were fetched, by digest."""

    keep: Keep  # stores each, in memory or elsewhere
    files: dict[bytes, File] = field(default_factory=dict)


async def fetch_manifest(node: Node, number: int) -> Signed[RoundManifest]:
    """Fetch the round manifest of a number from the space of a current trainer."""
    trainers = node.authority.trainers
    return await first_success(
        lambda key: fetch_record(node, RoundManifest, paths.round_manifest(key, number)), trainers
    )


async def fetch_pointer(node: Node) -> RoundPointer:
    """Fetch the round pointer of a current trainer."""
    trainers = node.authority.trainers
    return (await first_success(lambda key: fetch_record(node, RoundPointer, paths.newest_round(key)), trainers)).record


async def fetch_files(
    node: Node, ref: PayloadRef, parts: Sequence[Part], fetch: Callable[[ObjectRef], Awaitable[File]]
) -> Payload:
    """Return the files of a payload for weights with these parts: first the one with the head, which names the others.
    `fetch` returns a file that has the digest and the size. A ProtocolError says that there is no such head.
    """

    def named() -> list[ObjectRef]:
        head = read_head(first, parts)
        others = zip(head.digests, head.file_sizes[1:], strict=True)
        return [ObjectRef(digest=digest, size=size) for digest, size in others]

    first = await fetch(ref)
    # A file that is missing ends no download of another one, which would begin anew with the next try.
    return [first, *await gather(fetch, await node.run_sync(named), _AT_ONCE, cancel_others=False)]


async def fetch_payloads(
    node: Node,
    trainer: bytes,
    number: int,
    contributions: Sequence[CountedContribution | PlannedContribution],
    parts: Sequence[Part],
    fetched: FetchedFiles,
) -> list[Payload]:
    """Fetch the payloads of some contributions to a round, in order, but for the files that were fetched before.

    The worker's space may have another load than the trainer's, so it is tried first; the trainer has a copy of each.
    So a failure of the worker's space says nothing, and if it takes long, the copy is fetched beside it: a worker that
    serves the coordinator alone costs the others HEAD_START, and a second for each HEAD_START_BYTES of a file. All of
    its files together have no more than a single one of their size would have.
    """
    ends = {item.worker: trio.current_time() + _head_start(item.payload.total) for item in contributions}

    async def fetch_file(worker: bytes, ref: ObjectRef) -> File:
        worker_failed = trio.Event()

        async def from_space(writer: bytes) -> None:
            data = await fetch_object(node, paths.payload(writer, number, ref.digest), ref)
            fetched.files[ref.digest] = await node.run_sync(fetched.keep, data)
            tasks.cancel_scope.cancel()

        async def from_worker() -> None:
            with suppress(*STORAGE_ERRORS):
                await from_space(worker)
            worker_failed.set()

        async def from_trainer() -> None:
            with trio.move_on_at(min(ends[worker], trio.current_time() + _head_start(ref.size))) as head_start:
                await worker_failed.wait()
            if head_start.cancelled_caught:
                ends[worker] = -inf  # a space that hung once gets no head start with the other files
            await from_space(trainer)

        if ref.digest not in fetched.files:
            async with first_failure(*STORAGE_ERRORS) as tasks:
                tasks.start_soon(from_worker)
                tasks.start_soon(from_trainer)
        return fetched.files[ref.digest]

    async def fetch(item: CountedContribution | PlannedContribution) -> Payload:
        return await fetch_files(node, item.payload, parts, partial(fetch_file, item.worker))

    return await gather(fetch, contributions, _AT_ONCE)


def _head_start(size: int) -> float:
    return HEAD_START + size / HEAD_START_BYTES


async def fetch_state(
    node: Node, parts: tuple[Part, ...], trusted: RoundManifest | None
) -> tuple[Signed[RoundManifest], SharedState]:
    """Fetch the state that the pointer names, with its manifest; shards that are here already are not fetched again.
    NotFoundError: there is none that is newer than the trusted one. ForkError: the trainer signed another history in
    one epoch.
    """
    pointer = await fetch_pointer(node)
    signed = await fetch_record(node, RoundManifest, paths.round_manifest(pointer.trainer, pointer.state_number))
    if trusted is not None and signed.record.epoch <= trusted.epoch:
        if signed.record.number < trusted.number:
            raise NotFoundError(f"no state after round {trusted.number} is in storage")
        if signed.record.epoch < trusted.epoch:
            raise ForkError("a state of an epoch that is over", f"round manifest {signed.record.number}")

    async def fetch(ref: ObjectRef) -> None:
        path = f"{DOWNLOAD}{ref.digest.hex()}"
        try:
            await node.state.get(path, ref.size)
        except NotFoundError:
            data = await fetch_object(node, paths.state_shard(pointer.trainer, ref.digest), ref)
            await node.state.put(path, data)

    await gather(fetch, pointer.shards, _AT_ONCE)
    shards = [await node.state.get(f"{DOWNLOAD}{ref.digest.hex()}", ref.size) for ref in pointer.shards]
    state: SharedState = await node.run_sync(SharedState.from_shards, iter(shards), signed.record.state, parts)
    return signed, state


async def fetch_past_manifests(node: Node, newest: Signed[RoundManifest], steps: int) -> list[Signed[RoundManifest]]:
    """Return a trusted round manifest and those of so many steps before it, newest first, as far as storage has them:
    they say which groups are used up. Those of an earlier key of the trainer are in that key's space.
    """
    manifests = [newest]

    async def fetch_previous(trainer: bytes) -> Signed[RoundManifest]:
        path = paths.round_manifest(trainer, record.number - 1)
        signed = await answer_of(partial(fetch_record, node, RoundManifest, path), _PAST_SECONDS, path)
        if signed.digest != record.previous:
            raise ProtocolError("is of another history", signed.record.path)
        return signed

    while (record := manifests[-1].record).number > 0 and newest.record.state.step - record.state.step <= steps:
        other_trainers = sorted(node.revisions.all_trainers - {record.trainer})
        try:
            manifests.append(await first_success(fetch_previous, (record.trainer, *other_trainers)))
        except FOREIGN:
            break
    return manifests


_PAST_SECONDS: Final = 30.0  # for a manifest: whoever has stolen an earlier key may send it slowly
KEPT_ROUNDS: Final = 8


async def delete_rounds(node: Node, kept: Mapping[str, int]) -> None:
    """Delete objects of some kinds in this node's space, but for those of the first round to keep, or of later ones."""
    prefix = paths.writer_prefix(node.key.public)
    for path in [item.path async for item in node.store.list(prefix)]:
        kind, _, name = path.removeprefix(prefix).partition("/")
        number = name.partition("-")[0]
        if kind in kept and not (number.isdigit() and int(number) >= kept[kind]):
            await node.store.delete(path)


async def delete_old_contributions(node: Node, newest: int) -> None:
    """Delete the records and payloads of this site's contributions, but for those to the newest KEPT_ROUNDS rounds, and
    its products of closed rounds.

    The trainer has a copy of each payload that counts for as long as a site may need it. A store that refuses causes an
    event and no failure: what is left costs only space, and is deleted later.
    """
    oldest = newest + 1 - KEPT_ROUNDS
    try:
        await delete_rounds(node, {"contributions": oldest, "payloads": oldest, "products": newest + 1})
    except StoreError as error:
        node.telemetry.event("deletion-failed", error=str(error))
