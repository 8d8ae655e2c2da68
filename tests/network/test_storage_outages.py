"""Long outages of storage on a virtual clock: one node is cut off, the newest objects are lost, the meeting point is
replaced by an empty one. The network works on without what is missing, and as before when it is back.
"""

from collections.abc import AsyncIterator

import pytest
import trio

from grailnode.store.memory import MemoryStore
from protocol import paths
from roles.ports import ObjectInfo, ObjectStore, StoreError
from tests.support.simulation.network import Network, key
from tests.support.simulation.network_runs import CHOICES, run_nodes
from tests.support.simulation.virtual_clock import simulated

FIRST, LAST = 6, 30
"""The windows during which storage fails."""


class OutageStore:
    """A store that answers one node with 503 while the network says so."""

    def __init__(self, network: "PartlyCutOff") -> None:
        self._network = network
        self._inner = network.store

    async def put(self, path: str, data: bytes) -> None:
        await self._check(path)
        await self._inner.put(path, data)

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        await self._check(path)
        return await self._inner.get(path, max_bytes, offset=offset, size=size)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        await self._check(prefix)
        async for info in self._inner.list(prefix, after=after):
            yield info

    async def delete(self, path: str) -> None:
        await self._check(path)
        await self._inner.delete(path)

    async def _check(self, path: str) -> None:
        if self._network.is_out:
            await trio.sleep(0.5)
            raise StoreError(f"{path}: the service is unavailable (503 'SlowDown')")


class PartlyCutOff(Network):
    """A network in which storage fails for one node."""

    is_out = False
    unlucky_node = ""

    def medium(self, name: str, process: str) -> ObjectStore:
        return OutageStore(self) if name == self.unlucky_node else self.store


async def newest_version(network: Network) -> int:
    return (await network.head()).version


def check_no_contradiction(network: Network) -> None:
    """Check that nobody contradicted itself, and that no honest group was refused for what it contains."""
    for log in network.logs.values():
        assert not log.named("alarm")
        for verdict in log.named("verdict"):
            reasons = verdict.get("reasons", "")  # a node's own events have none
            assert set(filter(None, reasons.split(","))) <= {"version", "missing"}


@pytest.mark.parametrize("name", ["miner-1", "validator-1", "trainer"])
@simulated
async def test_a_node_that_storage_refuses_for_long_works_again_afterwards(name: str) -> None:
    network = PartlyCutOff(CHOICES, validators=2)
    network.unlucky_node = name
    async with run_nodes(network):
        await network.until_window(FIRST)
        network.is_out = True
        await network.until_window(FIRST + 4)  # what was under way has ended
        before = await newest_version(network)
        await network.until_window(LAST)
        during = await newest_version(network)
        network.is_out = False
        await network.until_window(LAST + 12)
        after = await newest_version(network)
    assert (during > before + 3) == (name != "trainer"), "the others go on without it"
    assert after > during + 2
    if name.startswith("miner"):
        assert any(event["window"] >= LAST for event in network.events(name, "delivered"))
    if name.startswith("validator"):
        assert any(event["window"] >= LAST and event["accepted"] for event in network.events(name, "verdict"))
    check_no_contradiction(network)


class ReplicatedStore(MemoryStore):
    """A store whose replica is a little behind: a failover undoes the newest puts of one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self._puts: list[tuple[str, bytes | None]] = []

    async def put(self, path: str, data: bytes) -> None:
        self._puts.append((path, self._objects.get(path)))
        await super().put(path, data)

    async def fail_over(self, bucket: str, count: int) -> None:
        """Undo the last puts below a prefix."""
        newest = [put for put in self._puts if put[0].startswith(bucket)][-count:]
        for path, before in reversed(newest):
            await (self.delete(path) if before is None else super().put(path, before))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trainer", "validator-0", "miner-1"])
@simulated
async def test_a_bucket_that_loses_its_newest_objects_stops_nobody_for_long(name: str) -> None:
    network = Network(CHOICES)
    network.store = store = ReplicatedStore()
    async with run_nodes(network):
        await network.until_window(FIRST)
        await store.fail_over(paths.writer_prefix(key(name).public), 10)
        await network.until_window(FIRST + 8)
        before = await newest_version(network)
        await network.until_window(FIRST + 24)
        assert await newest_version(network) > before + 3
        recent = [event for event in network.events("validator-0", "verdict") if event["window"] > FIRST + 12]
        assert any(event["accepted"] for event in recent)
    check_no_contradiction(network)


@simulated
async def test_a_meeting_point_that_is_replaced_by_an_empty_one_fills_again() -> None:
    network = Network(CHOICES)
    async with run_nodes(network):
        await network.until_window(FIRST)
        for prefix in (paths.participants(), "runs/", "revisions/"):
            for info in [info async for info in network.store.list(prefix)]:
                await network.store.delete(info.path)
        await network.until_window(FIRST + 30)
        keys = {info.path async for info in network.store.list(paths.participants())}
        for name in ("miner-1", "miner-2", "validator-0", "trainer"):
            assert paths.participant(key(name).public) in keys, f"{name} did not announce itself again"
        recent = [event for event in network.events("validator-0", "verdict") if event["window"] > FIRST + 20]
        assert any(event["accepted"] for event in recent)
    check_no_contradiction(network)
