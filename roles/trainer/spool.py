"""The objects that the trainer's three processes hand to each other, durable in the node's own state.

    weights/{version}/{number}  the tensors of a version (tensor_shards.py), written by the learner
    outbox/{version}-{step}     how many files these are, and the digest of what each host has written: a snapshot, from
                                the learner to the publisher
    inbox/{window}-{miner}      verified groups, from the collector to the learner; a later batch of the same window and
                                miner has "-{n}" at its end, where n outcomes had been logged before it
    intents/{window}-{miner}    the collector's write-ahead log: what it has decided, until inbox and outcomes have it
    outcomes/{window}-{miner}   the collector's outcome log: what became of each judged group
    canaries/{window}-{index}-{digest}  a group as the canary computes it, for the collector
    difficulty                  the newest difficulty table, from the collector to the publisher
    collector-progress          the oldest window for which verdicts may still come
    acknowledged                the groups that the training loop has learned from (roles/trainer/training_spool.py)
    chain/...                   what the publisher has published (roles/trainer/publish/history.py)

An object is complete or absent (the store's promise). Each has one writer, and the one reader that deletes it, so a
process that is killed at any instruction finds all that it needs to go on when it starts again. The files of a version
are never copied: a note in outbox/ or chain/weights/ says that they are complete and what they are. The learner deletes
those of which no note was written, the publisher those of versions that it does not need any more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import trio

from protocol import limits
from protocol.digest import Weights, digest_weights
from protocol.encoding import Record
from protocol.errors import ChainError, MalformedError
from protocol.judging.verdict import Judgement
from protocol.proof import Arithmetic
from protocol.quantization import quantize
from protocol.run import RunManifest
from roles.ports import ObjectStore
from roles.trainer.tensor_shards import SHARD_BYTES, RunSync, VersionSource, WrittenWeights, delete_below
from roles.trainer.verified_batch import VerifiedBatch, VerifiedGroup

CHAIN = "chain/"
WEIGHTS = "weights/"
OUTBOX = "outbox/"
INBOX = "inbox/"
INTENTS = "intents/"
OUTCOMES = "outcomes/"
CANARIES = "canaries/"
DIFFICULTY = "difficulty"
COLLECTOR_PROGRESS = "collector-progress"
ACKNOWLEDGED = "acknowledged"
PUBLISHED_WEIGHTS = "chain/weights/"
_NOTE_BYTES = 1 << 16


class CanaryNote(Record):
    """A group as a canary computes it."""

    kind: ClassVar[str] = "canary-note"
    max_bytes: ClassVar[int] = 2 * limits.MAX_VERDICT_BYTES
    arithmetic: Arithmetic
    judgement: Judgement  # its own one, of a group that it accepts
    # by how much the score of each token exceeds that of every other one, in units of 2^-19, rounded up, and 0 if it
    # does not: int32 little-endian, one for each token of a rollout, rollouts in order
    leads: tuple[bytes, ...]


OTHER_VERSION = (
    "of this node's state (if another version of the program wrote it, delete it and run `grailnode repair`)"
)
"""What an error says of a record that has another form."""


def canary_path(window: int, index: int, digest: bytes) -> str:
    """Return the path of what the canary has noted on a group, by the digest of its frame."""
    return f"{CANARIES}{window:010d}-{index}-{digest.hex()}"


@dataclass(frozen=True)
class SnapshotName:
    """The name of a snapshot in the outbox."""

    version: int  # the policy version that it becomes
    optimizer_step: int  # optimizer steps taken up to it

    @property
    def path(self) -> str:
        return f"{OUTBOX}{self.version:010d}-{self.optimizer_step:012d}"

    @classmethod
    def parse(cls, path: str) -> "SnapshotName":
        """Return the name that a path of the outbox stands for; MalformedError if it stands for none."""
        version, _, step = path.removeprefix(OUTBOX).partition("-")
        if not (version.isdigit() and step.isdigit()):
            raise MalformedError("not the name of a snapshot", f"{path} of this node's state")
        return cls(int(version), int(step))


async def list_snapshots(state: ObjectStore) -> list[SnapshotName]:
    """Return the names of the snapshots in the outbox, oldest version first."""
    return [SnapshotName.parse(item.path) async for item in state.list(OUTBOX)]


def weights_folder(version: int) -> str:
    """Return the folder of a version's weights."""
    return f"{WEIGHTS}{version:010d}/"


async def put_snapshot(
    state: ObjectStore, name: SnapshotName, source: VersionSource, run_sync: RunSync, shard_bytes: int = SHARD_BYTES
) -> None:
    """Put a snapshot into the outbox."""
    await note_snapshot(
        state, name, await source.put_version(state, weights_folder(name.version), run_sync, shard_bytes)
    )


async def note_snapshot(state: ObjectStore, name: SnapshotName, written: WrittenWeights) -> None:
    """Note in the outbox that a snapshot's files are complete, and what they are, on all hosts."""
    await state.put(name.path, " ".join([str(written.files), *map(bytes.hex, written.digests)]).encode())


async def read_note(state: ObjectStore, path: str) -> WrittenWeights:
    """Return what a note in outbox/ or chain/weights/ says of a version's files; the latter has no digests."""
    files, *digests = (await state.get(path, _NOTE_BYTES)).split()
    return WrittenWeights(int(files), tuple(bytes.fromhex(digest.decode()) for digest in digests))


async def count_shards(state: ObjectStore, path: str) -> int:
    """Return how many files a version's weights have, as a note in outbox/ or chain/weights/ says."""
    return (await read_note(state, path)).files


async def stored_versions(state: ObjectStore) -> set[int]:
    """Return the versions that have files of weights, complete or not."""
    return {int(item.path.removeprefix(WEIGHTS).partition("/")[0]) async for item in state.list(WEIGHTS)}


async def delete_unnamed_weights(state: ObjectStore, newest: int) -> None:
    """Delete the files of versions above the newest one: a process was killed before it wrote a note of them."""
    for version in sorted(await stored_versions(state)):
        if version > newest:
            await delete_below(state, weights_folder(version))


def published_path(version: int) -> str:
    """Return the path of the note of a published version, which says how many files its weights have."""
    return f"{PUBLISHED_WEIGHTS}{version:010d}"


async def newest_published_version(state: ObjectStore) -> int:
    """Return the newest version that the publisher has published; -1 before the first."""
    versions = [-1]
    async for item in state.list(PUBLISHED_WEIGHTS):
        digits = item.path.rsplit("/", 1)[-1]
        if not digits.isdigit():
            raise MalformedError("not a version", item.path)
        versions.append(int(digits))
    return max(versions)


async def next_version(state: ObjectStore) -> int:
    """Return the version of the next snapshot: one more than the newest that is published or in the outbox."""
    queued_versions = [name.version for name in await list_snapshots(state)]
    return max([await newest_published_version(state), *queued_versions]) + 1


async def newest_weights(state: ObjectStore) -> tuple[int, int] | None:
    """Return the version from which training continues, and how many files its weights have: that of the newest
    snapshot in the outbox, or the published version if that is as new; None if there is neither.
    """
    snapshots = await list_snapshots(state)
    version = await newest_published_version(state)
    if snapshots and snapshots[-1].version > version:  # an old one may still lie there, in the state of a backup
        return snapshots[-1].version, await count_shards(state, snapshots[-1].path)
    if version < 0:
        return None
    return version, await count_shards(state, published_path(version))


def checked_genesis(run: RunManifest, genesis: Callable[[], Weights]) -> Weights:
    """Return the weights of version 0 as they are published; ChainError if they are not those of the run manifest."""
    weights = quantize(genesis(), run.precision)
    if digest_weights(weights) != run.model.genesis:
        raise ChainError("this policy is not the genesis that the run names; use the one it was founded with", "policy")
    return weights


class Inbox:
    """The batches that the collector delivers, until no group of them is needed. Tasks may share it. Its reader
    remembers which groups it has: after a restart, or of a collector that was killed, a batch may come twice.
    """

    def __init__(self, state: ObjectStore) -> None:
        self._state = state
        self._batches: dict[str, dict[bytes, int]] = {}  # by path, versions of the groups by digest
        self._lock = trio.Lock()  # a batch that is deleted while the inbox is listed would be read again

    async def read(self) -> list[VerifiedGroup]:
        """Return the groups of the batches that have come since the last call."""
        async with self._lock:
            paths = {item.path async for item in self._state.list(INBOX)} - self._batches.keys()
            files = [(path, await self._state.get(path, VerifiedBatch.max_bytes)) for path in sorted(paths)]
            # from here on without a checkpoint: a caller that is cancelled has all groups, or none
            batches = {path: VerifiedBatch.from_bytes(data).groups for path, data in files}
            self._batches |= {path: {g.digest: g.version for g in groups} for path, groups in batches.items()}
        return [group for groups in batches.values() for group in groups]

    async def keep(self, is_needed: Callable[[bytes, int], bool]) -> None:
        """Delete the batches that were read and of which no group, by digest and version, is needed."""
        async with self._lock:
            for path, groups in [*self._batches.items()]:
                if not any(is_needed(digest, version) for digest, version in groups.items()):
                    await self._state.delete(path)
                    del self._batches[path]


def is_too_stale(version: int, newest: int, max_staleness: int) -> bool:
    """Return whether a group of a version is too old to be trained on, given the newest version."""
    return newest - version > max_staleness
