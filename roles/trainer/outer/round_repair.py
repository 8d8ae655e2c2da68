"""Rebuilds what a coordinator or a site has lost of its rounds (docs/guide/operate.md).

A coordinator's manifests, and a state from which its newest one follows, are in its own space: the rounds are applied
again, and their digests must be those that it signed. What the sites sent in a round is kept if it is whole; otherwise
it is what counted in the round, if that is applied again. A site gives up what it has, and
fetches the shared state when it starts; its error feedback begins with 0.
"""

from collections.abc import Set
from contextlib import suppress

from protocol import paths
from protocol.errors import ProtocolError
from protocol.identity.signing import Signed
from protocol.outer.comparing import SentRound, compare
from protocol.outer.robust import sent_round
from protocol.outer.round_checks import check_next_manifest
from protocol.outer.round_records import RoundManifest, RoundPointer
from protocol.outer.shared_state import SharedState
from protocol.pseudogradient import parts_of
from roles.node.identity import Node
from roles.ports import LineReporter, NotFoundError, RepairError, StateError
from roles.records import FOREIGN, fetch_object, fetch_record, open_record
from roles.trainer.outer import round_files
from roles.trainer.outer.round_judging import PROJECTIONS
from roles.trainer.outer.round_reader import FetchedFiles, fetch_past_manifests, fetch_payloads
from roles.trainer.spool import SnapshotName, newest_weights, next_version, put_snapshot, weights_folder
from roles.trainer.tensor_shards import TensorSource, delete_below, read_tensors


async def fetch_pointer_of(node: Node, trainer: bytes) -> Signed[RoundPointer] | None:
    """Return the round pointer that storage shows under a trainer's key; None if there is none of this run."""
    try:
        return await fetch_record(node, RoundPointer, paths.newest_round(trainer))
    except FOREIGN:
        return None


async def repair_rounds(node: Node, lost_paths: Set[str], say: LineReporter, *, is_rewound: bool = False) -> bool:
    """Rebuild a coordinator's rounds, after its chain, if they have lost something or are older than what storage
    shows; return whether this trainer closes rounds at all. RepairError: they cannot be rebuilt, or do not agree with a
    chain of which versions were taken back.
    """
    pointer = await fetch_pointer_of(node, node.key.public)
    manifests = await round_files.list_manifests(node.state)
    newest, trainer = manifests[-1] if manifests else (-1, node.key.public)
    is_lost = any(path.startswith(round_files.OUTER) for path in lost_paths)
    if pointer is None and not (manifests or is_lost):
        return False
    if is_rewound:
        raise RepairError(
            f"{round_files.ROUNDS}: the roots take back versions of this run, and its sites share a state of later "
            "ones, which cannot go back; followers have the last valid version again: write it with `grailnode export "
            "DIR`, and create a new run from it"
        )
    if pointer is None:  # maybe an earlier key closed the newest round, whose name is known also if it is lost
        names = [path.removeprefix(round_files.ROUNDS) for path in lost_paths if path.startswith(round_files.ROUNDS)]
        lost_manifests = [(int(name[:10]), paths.key_at_end(name)) for name in names]
        newest, trainer = max([(newest, trainer), *lost_manifests])
        if trainer != node.key.public and not is_lost:
            return True
        pointer = await fetch_pointer_of(node, trainer)
    if pointer is None:
        raise RepairError(
            f"{round_files.ROUNDS}: storage shows no round of this trainer; try again when its bucket answers"
        )
    if not is_lost and newest >= pointer.record.newest:
        return True
    if newest > pointer.record.newest:
        raise RepairError(
            f"{round_files.ROUNDS}: storage shows round {pointer.record.newest}, and this node has closed round "
            f"{newest}; try again when storage shows it, since a coordinator must not go back"
        )
    if pointer.record.trainer != node.key.public:  # an earlier key, which others may have by now
        digests: set[bytes] = set()
        if (newest, trainer) in manifests:
            digests.add((await round_files.get_manifest(node, trainer, newest)).digest)
        with suppress(NotFoundError, StateError, ProtocolError):  # what this node has published last
            data = await node.state.get(round_files.POINTER, RoundPointer.max_signed_bytes())
            digests.add(open_record(node, RoundPointer, pointer.record.path, data).record.digest)
        if newest < pointer.record.newest or digests != {pointer.record.digest}:
            raise RepairError(
                f"{round_files.ROUNDS}: storage shows a round {pointer.record.newest} of an earlier key, which this "
                "node did not close, as far as its state tells; restore its backup"
            )
    await _rebuild(node, pointer)
    say(f"{round_files.ROUNDS}: continues round {pointer.record.newest}, the newest that storage shows")
    return True


async def _rebuild(node: Node, pointer: Signed[RoundPointer]) -> None:
    """Fetch the state in storage, and apply the rounds that follow."""
    record, key = pointer.record, pointer.record.trainer
    try:
        signed = await fetch_record(node, RoundManifest, paths.round_manifest(key, record.state_number))
        shards = [await fetch_object(node, paths.state_shard(key, ref.digest), ref) for ref in record.shards]
        weights = await newest_weights(node.state)
        if weights is None:
            raise RepairError("chain/: there is no version of the policy; repair it first")
        version, count = weights
        tensors = await read_tensors(node.state, weights_folder(version), count)
        parts = parts_of({name: tensor.shape for name, tensor in tensors.items()})
        shared: SharedState = await node.run_sync(SharedState.from_shards, iter(shards), signed.record.state, parts)
        manifests = list(reversed(await fetch_past_manifests(node, signed, signed.record.state.step)))
        await _put_version(node, signed.record, shared)
        sent: dict[int, SentRound] = {}
        for number in range(record.state_number + 1, record.newest + 1):
            closing = await fetch_record(node, RoundManifest, paths.round_manifest(key, number))
            check_next_manifest(signed, closing)
            shared, sent[number] = await _after(node, shared, signed.record, closing.record)
            await _put_version(node, closing.record, shared)
            manifests.append(closing)
            signed = closing
    except FOREIGN as error:
        raise RepairError(f"{round_files.ROUNDS}: cannot be rebuilt from storage: {error}") from error
    if signed.digest != record.digest:
        raise RepairError(f"{round_files.ROUNDS}: storage shows another round {record.newest} than its pointer")
    sent |= await round_files.get_sent(node.state, record.newest)  # which have refused contributions as well
    await delete_below(node.state, round_files.OUTER)
    for manifest in manifests:
        await round_files.put_manifest(node.state, manifest)
    for number, of_round in sent.items():
        await round_files.put_sent(node.state, number, of_round)
    await round_files.put_state(node, record.newest, shared)
    await node.state.put(round_files.POINTER, pointer.data)


async def _after(
    node: Node, shared: SharedState, opening: RoundManifest, closing: RoundManifest
) -> tuple[SharedState, SentRound]:
    """Return the state after a round, and what the sites sent whose contributions count."""
    parts, fetched = shared.stream_parts(opening.rules), FetchedFiles(node.scratch())
    payloads = await fetch_payloads(node, closing.trainer, closing.number, closing.counted, parts, fetched)
    factors = [item.factor for item in closing.counted]
    comparison = await node.run_sync(compare, shared, payloads, opening.rules, node.key.derive(PROJECTIONS))
    after: SharedState = await node.run_sync(shared.after, payloads, factors, opening.rules)
    after = after.with_momentum(closing.rules)
    if after.digests != closing.state:
        raise RepairError(f"round {closing.number}: its contributions give another state than its manifest")
    return after, sent_round([item.worker for item in closing.counted], comparison)


async def _put_version(node: Node, manifest: RoundManifest, shared: SharedState) -> None:
    """Put the policy version of a state into the outbox, if it is not published yet."""
    following = await next_version(node.state)
    if manifest.version > following:
        raise RepairError(f"outbox/: versions {following} to {manifest.version - 1} are lost, and not published")
    if manifest.version == following:
        view = await node.run_sync(shared.bf16_view)
        name = SnapshotName(manifest.version, manifest.state.step)
        await put_snapshot(node.state, name, TensorSource.of(view), node.run_sync)


async def repair_site(node: Node, lost_paths: Set[str], say: LineReporter) -> None:
    """Give up a site's own state if a part of it is lost; the shared state is fetched at the next start."""
    if not any(path.startswith(round_files.OUTER) for path in lost_paths):
        return
    await delete_below(node.state, round_files.OUTER)
    say(f"{round_files.OUTER}: is fetched again; error feedback and the optimizer's moments begin with 0")
