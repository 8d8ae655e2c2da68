"""Animals that do honest work and play with storage: each is a store that does something else than the miner behind it
asks for.

What they break is not what was computed but what was promised, by whom, and when; so they need a whole network to be
seen (tests/zoo/test_smugglers.py).
"""

from collections.abc import AsyncIterator

from protocol import limits, paths
from protocol.digest import content_digest
from protocol.identity.signing import SigningKey, open_signed, sign
from protocol.rollout.batch import Commitment
from roles.ports import ObjectInfo, ObjectStore


class Honest:
    """Passes everything on."""

    def __init__(self, store: ObjectStore, key: SigningKey, neighbour: bytes) -> None:
        self.store = store
        self.key = key
        self.neighbour = neighbour
        self.told: dict[str, bytes] = {}

    async def put(self, path: str, data: bytes) -> None:
        """As the port says, to the miner that looks again; what others see is `smuggle`'s."""
        self.told[path] = data
        await self.smuggle(path, data)

    async def smuggle(self, path: str, data: bytes) -> None:
        """Put what others see."""
        await self.store.put(path, data)

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        """As the port says; of what was put, that."""
        if path in self.told:
            return self.told[path][offset:][: size if size is not None else max_bytes]
        return await self.store.get(path, max_bytes, offset=offset, size=size)

    def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """As the port says."""
        return self.store.list(prefix, after=after)

    async def delete(self, path: str) -> None:
        """As the port says."""
        await self.store.delete(path)

    def promised(self, path: str, data: bytes) -> Commitment | None:
        """The commitment that is being put, None where it is something else."""
        if "/commitments/" not in f"/{path}":
            return None
        return open_signed(data, Commitment, [self.key.public]).record


class Late(Honest):
    """Puts every commitment when the next one is due: after the second round is out."""

    held: tuple[str, bytes] | None = None

    async def smuggle(self, path: str, data: bytes) -> None:
        """The one before instead of a commitment."""
        if self.promised(path, data) is None:
            return await self.store.put(path, data)
        if self.held is not None:
            await self.store.put(*self.held)
        self.held = path, data
        return None


class OverQuota(Honest):
    """Promises more groups than a miner may deliver."""

    async def smuggle(self, path: str, data: bytes) -> None:
        """A commitment to the groups, again and again."""
        promise = self.promised(path, data)
        if promise is not None:
            data = sign(promise.model_copy(update={"groups": promise.groups * 4}), self.key)
        await self.store.put(path, data)


class AnothersKey(Honest):
    """Commits to its work in another miner's name, whose key it does not have."""

    async def smuggle(self, path: str, data: bytes) -> None:
        """A commitment that names the neighbour, where the own one is looked for."""
        promise = self.promised(path, data)
        if promise is None:
            return await self.store.put(path, data)
        forged = sign(promise.model_copy(update={"miner": self.neighbour}), self.key)
        await self.store.put(path, forged)
        return None


class Swapped(Honest):
    """Replaces the batch by another of the same size as soon as it is committed to."""

    async def smuggle(self, path: str, data: bytes) -> None:
        """After the commitment, other bytes where the batch was."""
        await self.store.put(path, data)
        promise = self.promised(path, data)
        if promise is not None:
            batch = paths.batch(self.key.public, promise.window, promise.batch)
            await self.store.put(batch, bytes(reversed(await self.store.get(batch, limits.MAX_BATCH_BYTES))))


class SwappedAfterTheVerdict(Honest):
    """A store for everybody, which exchanges a miner's batch the moment that somebody has put a verdict on it."""

    async def put(self, path: str, data: bytes) -> None:
        """After a verdict on the miner, other bytes where its batch was."""
        await self.store.put(path, data)
        if "/verdicts/" in f"/{path}" and self.key.public.hex() in path:
            window = paths.window_of(path)
            promise = open_signed(
                await self.store.get(paths.commitment(self.key.public, window), limits.MAX_COMMITMENT_BYTES),
                Commitment,
                [self.key.public],
            ).record
            batch = paths.batch(self.key.public, window, promise.batch)
            other = bytes(reversed(await self.store.get(batch, limits.MAX_BATCH_BYTES)))
            assert content_digest(other) != promise.batch
            await self.store.put(batch, other)
