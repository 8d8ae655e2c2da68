"""How a site reads rounds from storage: round manifests, the payloads that they name, and whole states; and what it
deletes from its own space when a round is over.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import trio

from protocol import paths
from protocol.errors import ForkError
from protocol.identity.signing import Signed
from protocol.objects import ObjectRef
from protocol.outer.round_records import (
    CountedContribution,
    PlannedContribution,
    RoundContribution,
    RoundManifest,
    RoundPointer,
)
from protocol.outer.shared_state import SharedState
from protocol.pseudogradient import Part
from roles.first_failure import first_failure
from roles.gather import STORAGE_ERRORS, first_success, gather
from roles.node.identity import Node
from roles.ports import NotFoundError, StoreError
from roles.records import FOREIGN, fetch_object, fetch_record
from roles.trainer.outer.round_files import DOWNLOAD

_AT_ONCE = 4  # downloads

HEAD_START: Final = 5.0
HEAD_START_BYTES: Final = 10_000_000
"""Seconds, and bytes a second, that a worker's space has before the trainer's copy of a payload is fetched as well."""


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


async def fetch_payloads(
    node: Node,
    trainer: bytes,
    contributions: Sequence[CountedContribution | PlannedContribution],
    fetched: dict[bytes, bytes],
) -> list[bytes]:
    """Fetch the payloads of some contributions, in order, but for those that were fetched before, by digest.

    The worker's space may have another load than the trainer's, so it is tried first; the trainer has a copy of each.
    So a failure of the worker's space says nothing, and if it takes long, the copy is fetched beside it: a worker that
    serves the coordinator alone costs the others HEAD_START, and a second for each HEAD_START_BYTES of its payload.
    """

    async def fetch(item: CountedContribution | PlannedContribution) -> bytes:
        worker_failed = trio.Event()

        async def from_space(writer: bytes) -> None:
            path = paths.payload(writer, item.payload.digest)
            fetched[item.payload.digest] = await fetch_object(node, path, item.payload)
            tasks.cancel_scope.cancel()

        async def from_worker() -> None:
            with suppress(*STORAGE_ERRORS):
                await from_space(item.worker)
            worker_failed.set()

        async def from_trainer() -> None:
            with trio.move_on_after(HEAD_START + item.payload.size / HEAD_START_BYTES):
                await worker_failed.wait()
            await from_space(trainer)

        if item.payload.digest not in fetched:
            async with first_failure(*STORAGE_ERRORS) as tasks:
                tasks.start_soon(from_worker)
                tasks.start_soon(from_trainer)
        return fetched[item.payload.digest]

    return await gather(fetch, contributions, _AT_ONCE)


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
    they say which groups are used up.
    """
    manifests = [newest]
    while (record := manifests[-1].record).number > 0 and newest.record.state.step - record.state.step <= steps:
        try:
            signed = await fetch_record(node, RoundManifest, paths.round_manifest(record.trainer, record.number - 1))
        except FOREIGN:
            break
        if signed.digest != record.previous:
            break
        manifests.append(signed)
    return manifests


KEPT_ROUNDS: Final = 8


async def delete_old_contributions(node: Node, newest: int) -> None:
    """Delete the records and payloads of this site's contributions, but for those to the newest KEPT_ROUNDS rounds, and
    its products of closed rounds.

    The trainer has a copy of each payload that counts for as long as a site may need it. A store that refuses causes an
    event and no failure: what is left costs only space, and is deleted later.
    """
    key = node.key.public
    try:
        prefix = paths.kind_prefix(key, "contributions")
        for path in [item.path async for item in node.store.list(prefix)]:
            number = path.removeprefix(prefix)
            if not number.isdigit() or int(number) > newest - KEPT_ROUNDS:
                continue
            try:
                record = (await fetch_record(node, RoundContribution, path)).record
            except FOREIGN:
                pass  # somebody changed it; its payload is found by nobody
            else:
                await node.store.delete(paths.payload(key, record.payload.digest))
            await node.store.delete(path)
        prefix = paths.kind_prefix(key, "products")
        for path in [item.path async for item in node.store.list(prefix)]:
            number = path.removeprefix(prefix).partition("-")[0]
            if number.isdigit() and int(number) <= newest:
                await node.store.delete(path)
    except StoreError as error:
        node.telemetry.event("deletion-failed", error=str(error))
