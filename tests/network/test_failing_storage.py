"""Storage that does not answer, or answers falsely: whose work it costs, and whose not."""

from collections import Counter
from typing import Any

import pytest

from grailnode.store.memory import MemoryStore
from protocol import paths
from roles.node.identity import Node
from roles.ports import ObjectStore, StoreError
from roles.trainer.spool import OUTCOMES
from roles.trainer.verified_batch import WindowOutcomes
from tests.network.unreachable_store import UnreachableStore
from tests.support.simulation.network import Network, key
from tests.support.simulation.network_runs import CHOICES, run_nodes, verdicts
from tests.support.simulation.virtual_clock import simulated


class FlakyStore(UnreachableStore):
    """A store that fails below one prefix: two of three reads of each part are false, or every other one fails."""

    def __init__(self, inner: MemoryStore, prefix: str, is_false: bool) -> None:
        super().__init__(inner, prefix)
        self._is_false = is_false
        self._reads: Counter[tuple[str, int]] = Counter()

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        data = await self._inner.get(path, max_bytes, offset=offset, size=size)
        if not path.startswith(self._prefix):
            return data
        self._reads[path, offset] += 1
        reads = self._reads[path, offset]
        if reads % (3 if self._is_false else 2) == 0:
            return data
        if not self._is_false:
            raise StoreError(f"{path}: the connection was reset")
        return data[:-1] + bytes([data[-1] ^ 1 << reads % 8])

    @property
    def reads(self) -> int:
        """The number of reads below the prefix."""
        return self._reads.total()


class NetworkWithHiddenPath(Network):
    """A network whose validator cannot read one path, which a test sets."""

    hidden_path = "nothing"

    def node(self, name: str, process: str = "", store: ObjectStore | None = None) -> Node:
        if name.startswith("validator"):
            store = HidingStore(self)
        return super().node(name, process, store)


class HidingStore(UnreachableStore):
    """A store in which the hidden path of a network cannot be read."""

    def __init__(self, network: NetworkWithHiddenPath) -> None:
        super().__init__(network.store, "")
        self._network = network

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if path == self._network.hidden_path:
            raise StoreError(f"{path}: connection refused")
        return await self._inner.get(path, max_bytes, offset=offset, size=size)


class NetworkWithoutBatches(Network):
    """A network whose trainer cannot reach the first miner's batches."""

    def node(self, name: str, process: str = "", store: ObjectStore | None = None) -> Node:
        if process == "/download":
            store = UnreachableStore(self.store, paths.kind_prefix(key("miner-1").public, "batches"))
        return super().node(name, process, store)


@simulated
async def test_an_unreachable_miner_delays_nobody_and_its_groups_are_recorded_in_the_end():
    network = NetworkWithoutBatches(CHOICES)
    async with run_nodes(network):
        await network.until_window(9)
    collected_events: dict[str, list[dict[str, Any]]] = {}
    for event in network.events("trainer/download", "collected"):
        collected_events.setdefault(event["miner"], []).append(event)
    reachable = collected_events[key("miner-2").public.hex()[:8]]
    assert len(reachable) >= 6
    assert sum(event["used"] for event in reachable) >= 4 * 4
    assert not any(event["used"] for event in collected_events.get(key("miner-1").public.hex()[:8], []))
    assert (await network.head()).version >= 4  # the trainer goes on learning
    outcomes = {}
    async for info in network.states["trainer"].list(OUTCOMES):
        window_outcomes = WindowOutcomes.from_bytes(await network.states["trainer"].get(info.path, 1 << 20))
        if window_outcomes.miner == key("miner-1").public:
            outcomes[window_outcomes.window] = {item.status for item in window_outcomes.outcomes}
    assert {1, 2} <= outcomes.keys()
    assert set.union(*outcomes.values()) == {"unreachable"}


@pytest.mark.parametrize("is_false", [True, False], ids=["false", "no answer"])
@simulated
async def test_failures_of_storage_cost_a_miner_no_rejection(is_false: bool):
    network = Network(CHOICES)
    prefix = paths.kind_prefix(key("miner-1").public, "batches")
    flaky_store = FlakyStore(network.store, prefix, is_false)
    network.medium = lambda name, process: flaky_store if name == "validator-0" else network.store  # type: ignore[method-assign]
    async with run_nodes(network):
        await network.until_window(6)
    assert flaky_store.reads >= 4 * 2 * 3
    on_miner = await verdicts(network, "miner-1", range(5))
    assert len(on_miner) >= 3
    assert {judgement.reason for verdict in on_miner.values() for judgement in verdict.judgements} == {""}


@simulated
async def test_a_validator_that_cannot_read_a_version_abstains_on_commitments_to_it():
    network = NetworkWithHiddenPath(CHOICES)
    async with run_nodes(network):
        await network.until_window(5)
        newest = (await network.head()).version
        network.hidden_path = paths.head(key("trainer").public)
        await network.until_window(9)
    log = network.logs["validator-0"]
    assert not any(event["rejected"] for event in log.named("verdict"))
    delivered = network.events("miner-1", "delivered")
    unknown_windows = {event["window"] for event in delivered if event["version"] > newest}
    assert 8 in unknown_windows
    assert {event["window"] for event in log.named("not-judged")} == unknown_windows
    assert not log.named("window-abandoned")


class StoreWithoutBatches(UnreachableStore):
    """A store whose batches cannot be read while it is away."""

    is_away = False

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if self.is_away and "/batches/" in path:
            raise StoreError(f"{path}: the network is unreachable")
        return await self._inner.get(path, max_bytes, offset=offset, size=size)


@simulated
async def test_an_outage_of_a_validators_network_costs_no_miner_a_rejection():
    network = Network(CHOICES)
    store = StoreWithoutBatches(network.store, "")
    network.medium = lambda name, process: store if name == "validator-0" else network.store  # type: ignore[method-assign]
    async with run_nodes(network, miners=2):
        await network.until_window(6)
        store.is_away = True
        await network.until_window(7)
        store.is_away = False
        await network.until_window(10)
    for miner in ("miner-1", "miner-2"):
        on_miner = await verdicts(network, miner, range(10))
        assert len(on_miner) >= 7
        assert not any(item.reason for verdict in on_miner.values() for item in verdict.judgements)
