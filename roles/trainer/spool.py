"""What the trainer's three processes hand to each other: durable objects in the node's own state.

    outbox/{version}-{step}      the learner's BF16 snapshots (safetensors), for the publisher
    inbox/{window}-{miner}       verified groups, for the learner; behind -{n} those that a later settlement adds to n
    outcomes settling/{window}-{miner}    what the collector has decided, until inbox and account both have it
    collected/{window}-{miner}   what became of each verdict's groups: the collector's account
    collecting                   the oldest window of which something may still come
    chain/...                    what the publisher has published

An object is complete or not there (the store's promise), and each has one writer and one reader who deletes it, so a
process killed at any instruction finds on its return what it needs to go on.
"""

from dataclasses import dataclass

from protocol.chain import safetensors
from protocol.digest import Weights
from protocol.errors import MalformedError
from protocol.limits import MAX_SHARD_BYTES
from roles.ports import ObjectStore

OUTBOX = "outbox/"
INBOX = "inbox/"
SETTLING = "settling/"
COLLECTED = "collected/"
COLLECTING = "collecting"
PUBLISHED = "chain/published"


@dataclass(frozen=True)
class SnapshotName:
    """A snapshot in the outbox: the version it is to become, and the optimizer steps behind it."""

    version: int
    optimizer_step: int

    @property
    def path(self) -> str:
        """Where it lies."""
        return f"{OUTBOX}{self.version:010d}-{self.optimizer_step:012d}"

    @classmethod
    def parse(cls, path: str) -> "SnapshotName":
        """The name at a path of the outbox."""
        version, step = path.removeprefix(OUTBOX).split("-")
        return cls(int(version), int(step))


async def snapshots(state: ObjectStore) -> list[SnapshotName]:
    """The snapshots that wait, oldest version first."""
    return [SnapshotName.parse(item.path) async for item in state.list(OUTBOX)]


async def put_snapshot(state: ObjectStore, name: SnapshotName, weights: Weights) -> None:
    """Hand a snapshot to the publisher.

    Raises:
        StoreError: the state cannot be written.
    """
    await state.put(name.path, safetensors.write(weights))


async def get_snapshot(state: ObjectStore, name: SnapshotName) -> Weights:
    """A snapshot's weights.

    Raises:
        StoreError, ProtocolError: the state is damaged.
    """
    return safetensors.read(await state.get(name.path, MAX_SHARD_BYTES))


async def last_published(state: ObjectStore) -> int:
    """The newest version that the publisher has published; -1 before the first."""
    versions = [-1]
    async for item in state.list(PUBLISHED + "/"):
        digits = item.path.rsplit("/", 1)[-1]
        if not digits.isdigit():
            raise MalformedError("not a version", item.path)
        versions.append(int(digits))
    return max(versions)


async def next_version(state: ObjectStore) -> int:
    """The version that the next snapshot becomes: behind everything published and everything that waits."""
    waiting = [name.version for name in await snapshots(state)]
    return max([await last_published(state), *waiting]) + 1
