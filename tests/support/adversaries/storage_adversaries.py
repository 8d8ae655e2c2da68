"""Adversaries that compute honestly and cheat with storage: each is a store that changes what its miner puts.

They falsify commitments, keys or times, so that only a whole network shows their effect
(tests/adversaries/test_storage_adversaries.py).
"""

from collections.abc import AsyncIterator

from protocol import limits, paths
from protocol.digest import content_digest
from protocol.identity.signing import SigningKey, open_signed, sign
from protocol.rollout.batch import Commitment
from roles.ports import ObjectInfo, ObjectStore


class HonestStore:
    """Changes nothing.

    Args:
        store: the shared store.
        key: the miner's key.
        neighbour: public key of another miner.
    """

    def __init__(self, store: ObjectStore, key: SigningKey, neighbour: bytes) -> None:
        self.store = store
        self.key = key
        self.neighbour = neighbour
        self.own_puts: dict[str, bytes] = {}

    async def put(self, path: str, data: bytes) -> None:
        """Implements ObjectStore.put for the miner itself; `put_for_others` decides what the others see."""
        self.own_puts[path] = data
        await self.put_for_others(path, data)

    async def put_for_others(self, path: str, data: bytes) -> None:
        """Put what the other participants see."""
        await self.store.put(path, data)

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        """Implements ObjectStore.get; the miner reads its own puts unchanged."""
        if path in self.own_puts:
            return self.own_puts[path][offset:][: size if size is not None else max_bytes]
        return await self.store.get(path, max_bytes, offset=offset, size=size)

    def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        return self.store.list(prefix, after=after)

    async def delete(self, path: str) -> None:
        await self.store.delete(path)

    def open_commitment(self, path: str, data: bytes) -> Commitment | None:
        """Return the commitment in a put, or None for another object."""
        if "/commitments/" not in f"/{path}":
            return None
        return open_signed(data, Commitment, [self.key.public]).record


class LateStore(HonestStore):
    """Puts every commitment when the next one is due, after its own deadline."""

    pending_put: tuple[str, bytes] | None = None

    async def put_for_others(self, path: str, data: bytes) -> None:
        """Put the previous commitment in place of this one."""
        if self.open_commitment(path, data) is None:
            return await self.store.put(path, data)
        if self.pending_put is not None:
            await self.store.put(*self.pending_put)
        self.pending_put = path, data
        return None


class OverQuotaStore(HonestStore):
    """Commits to more groups than a miner may deliver."""

    async def put_for_others(self, path: str, data: bytes) -> None:
        """Put a commitment that lists each group four times."""
        commitment = self.open_commitment(path, data)
        if commitment is not None:
            data = sign(commitment.model_copy(update={"groups": commitment.groups * 4}), self.key)
        await self.store.put(path, data)


class ForeignKeyStore(HonestStore):
    """Commits in the name of another miner, whose key it does not have."""

    async def put_for_others(self, path: str, data: bytes) -> None:
        """Put a commitment that names the neighbour at the miner's own path."""
        commitment = self.open_commitment(path, data)
        if commitment is None:
            return await self.store.put(path, data)
        false_commitment = sign(commitment.model_copy(update={"miner": self.neighbour}), self.key)
        await self.store.put(path, false_commitment)
        return None


class SwappingStore(HonestStore):
    """Replaces the batch by another of the same size as soon as the commitment is put."""

    async def put_for_others(self, path: str, data: bytes) -> None:
        """Put other bytes at the path of the batch after the commitment."""
        await self.store.put(path, data)
        commitment = self.open_commitment(path, data)
        if commitment is not None:
            batch_path = paths.batch(self.key.public, commitment.window, commitment.batch)
            await self.store.put(batch_path, bytes(reversed(await self.store.get(batch_path, limits.MAX_BATCH_BYTES))))


class LateSwappingStore(HonestStore):
    """A store of the whole network that replaces a miner's batch when a validator puts a verdict on it."""

    async def put(self, path: str, data: bytes) -> None:
        """Put other bytes at the path of the batch after a verdict on the miner."""
        await self.store.put(path, data)
        if "/verdicts/" in f"/{path}" and self.key.public.hex() in path:
            window = paths.window_of(path)
            commitment = open_signed(
                await self.store.get(paths.commitment(self.key.public, window), limits.MAX_COMMITMENT_BYTES),
                Commitment,
                [self.key.public],
            ).record
            batch_path = paths.batch(self.key.public, window, commitment.batch)
            other = bytes(reversed(await self.store.get(batch_path, limits.MAX_BATCH_BYTES)))
            assert content_digest(other) != commitment.batch
            await self.store.put(batch_path, other)
