"""Miners that compute honestly and cheat with storage, in a whole network: none of their work counts."""

import pytest

from grailnode.node.wiring import run_miner
from protocol import limits, paths
from protocol.encoding import content_digest
from protocol.identity.signing import SigningKey, open_signed, sign
from protocol.judging.verdict import Reason, Verdict
from protocol.rollout.batch import Commitment
from roles.miner.miner_settings import MinerSettings
from roles.ports import ObjectStore
from tests.support.builders.recipes import demo_rules
from tests.support.faults.decorated_store import DecoratedStore
from tests.support.simulation.network import Network, key
from tests.support.simulation.network_runs import run_nodes, verdicts
from tests.support.simulation.virtual_clock import simulated


class HonestStore(DecoratedStore):
    """A store that changes what its miner puts; this one changes nothing.

    Args:
        store: the shared store.
        key: the miner's key.
        neighbour: public key of another miner.
    """

    def __init__(self, store: ObjectStore, key: SigningKey, neighbour: bytes) -> None:
        super().__init__(store)
        self.key = key
        self.neighbour = neighbour
        self.own_puts: dict[str, bytes] = {}

    async def put(self, path: str, data: bytes) -> None:
        """Put for the miner itself; `put_for_others` decides what the others see."""
        self.own_puts[path] = data
        await self.put_for_others(path, data)

    async def put_for_others(self, path: str, data: bytes) -> None:
        """Put what the other participants see."""
        await self.inner.put(path, data)

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        """Return an object; the miner reads its own puts unchanged."""
        if path in self.own_puts:
            return self.own_puts[path][offset:][: size if size is not None else max_bytes]
        return await self.inner.get(path, max_bytes, offset=offset, size=size)

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
            await self.inner.put(path, data)
            return
        if self.pending_put is not None:
            await self.inner.put(*self.pending_put)
        self.pending_put = path, data


class OverQuotaStore(HonestStore):
    """Commits to more groups than a miner may deliver."""

    async def put_for_others(self, path: str, data: bytes) -> None:
        """Put a commitment that lists each group four times."""
        commitment = self.open_commitment(path, data)
        if commitment is not None:
            data = sign(commitment.model_copy(update={"groups": commitment.groups * 4}), self.key)
        await self.inner.put(path, data)


class ForeignKeyStore(HonestStore):
    """Commits in the name of another miner, whose key it does not have."""

    async def put_for_others(self, path: str, data: bytes) -> None:
        """Put a commitment that names the neighbour at the miner's own path."""
        commitment = self.open_commitment(path, data)
        if commitment is not None:
            data = sign(commitment.model_copy(update={"miner": self.neighbour}), self.key)
        await self.inner.put(path, data)


class SwappingStore(HonestStore):
    """Replaces the batch by another of the same size as soon as the commitment is put."""

    async def put_for_others(self, path: str, data: bytes) -> None:
        """Put other bytes at the path of the batch after the commitment."""
        await self.inner.put(path, data)
        commitment = self.open_commitment(path, data)
        if commitment is not None:
            batch_path = paths.batch(self.key.public, commitment.window, commitment.batch)
            await self.inner.put(batch_path, bytes(reversed(await self.inner.get(batch_path, limits.MAX_BATCH_BYTES))))


class LateSwappingStore(HonestStore):
    """A store of the whole network that replaces a miner's batch when a validator puts a verdict on it."""

    async def put(self, path: str, data: bytes) -> None:
        """Put other bytes at the path of the batch after a verdict on the miner."""
        await self.inner.put(path, data)
        if "/verdicts/" in f"/{path}" and self.key.public.hex() in path:
            window = paths.window_of(path)
            commitment = open_signed(
                await self.inner.get(paths.commitment(self.key.public, window), limits.MAX_COMMITMENT_BYTES),
                Commitment,
                [self.key.public],
            ).record
            batch_path = paths.batch(self.key.public, window, commitment.batch)
            other = bytes(reversed(await self.inner.get(batch_path, limits.MAX_BATCH_BYTES)))
            assert content_digest(other) != commitment.batch
            await self.inner.put(batch_path, other)


RULES = demo_rules(groups=4, group_size=8)
WINDOWS = range(2, 5)


async def run_adversary(network: Network, store_type: type[HonestStore]) -> None:
    """Run a miner whose store cheats, until cancelled."""
    store = store_type(network.store, key("adversary"), key("miner-1").public)
    settings = MinerSettings(groups=4, chunk=4, share=0.7, poll_seconds=0.2)
    node = network.node("adversary", store=store)
    await run_miner(node, network.task(node), network.compute, settings)


async def verdicts_on_adversary(store_type: type[HonestStore]) -> dict[int, Verdict]:
    """Run a network with an honest miner and an adversary until the end of the windows, and return the verdicts on the
    adversary. The honest miner's work must have been accepted.
    """
    network = Network(RULES)
    async with run_nodes(network, miners=1) as nursery:
        nursery.start_soon(run_adversary, network, store_type)
        await network.until_window(WINDOWS.stop + 1)
    assert network.events("adversary", "delivered")
    honest = await verdicts(network, "miner-1", WINDOWS)
    assert len(honest) >= len(WINDOWS) - 1
    assert all(judgement.accepted for verdict in honest.values() for judgement in verdict.judgements)
    return await verdicts(network, "adversary", WINDOWS)


@simulated
async def test_a_miner_with_an_honest_store_is_accepted() -> None:
    miner_verdicts = await verdicts_on_adversary(HonestStore)
    assert miner_verdicts
    assert all(judgement.accepted for verdict in miner_verdicts.values() for judgement in verdict.judgements)


@pytest.mark.parametrize("store_type", [LateStore, ForeignKeyStore])
@simulated
async def test_a_late_commitment_or_one_by_another_key_is_not_judged(store_type: type[HonestStore]) -> None:
    assert not await verdicts_on_adversary(store_type)


@pytest.mark.parametrize(("store_type", "reason"), [(OverQuotaStore, Reason.QUOTA), (SwappingStore, Reason.MALFORMED)])
@simulated
async def test_every_group_is_rejected(store_type: type[HonestStore], reason: Reason) -> None:
    miner_verdicts = await verdicts_on_adversary(store_type)
    assert miner_verdicts
    assert {item.reason for verdict in miner_verdicts.values() for item in verdict.judgements} == {reason.value}


@simulated
async def test_a_batch_that_is_swapped_after_its_verdict_is_not_trained_on() -> None:
    network = Network(RULES)
    network.store = LateSwappingStore(network.store, key("miner-2"), b"")  # type: ignore[assignment]
    async with run_nodes(network, miners=2):
        await network.until_window(WINDOWS.stop + 2)
    for miner, is_swapped in (("miner-1", False), ("miner-2", True)):
        miner_verdicts = await verdicts(network, miner, WINDOWS)
        assert all(judgement.accepted for verdict in miner_verdicts.values() for judgement in verdict.judgements)
        name = key(miner).public.hex()
        events = [event for event in network.events("trainer/download", "collected") if name.startswith(event["miner"])]
        assert events
        assert all((event["used"] == 0) == is_swapped for event in events)
