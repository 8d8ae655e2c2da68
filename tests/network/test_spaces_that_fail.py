"""Buckets that answer nobody any more, or bend their answers: whose loss it is, and whose it is not."""

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from grailnode.store.memory import MemoryStore
from protocol import paths
from roles.node.identity import Node
from roles.ports import ObjectInfo, ObjectStore, StoreError
from roles.trainer.spool import OUTCOMES
from roles.trainer.verified_batch import WindowOutcomes
from tests.network.test_network import CHOICES, running, simulate, verdicts
from tests.support.simulation.network import Network, key


class Unreachable:
    """A store in which what lies below one prefix cannot be read."""

    def __init__(self, inner: MemoryStore, prefix: str) -> None:
        self._inner = inner
        self._prefix = prefix

    async def put(self, path: str, data: bytes) -> None:
        await self._inner.put(path, data)

    async def delete(self, path: str) -> None:
        await self._inner.delete(path)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        async for info in self._inner.list(prefix, after=after):
            yield info

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if path.startswith(self._prefix):
            await trio.sleep(1.0)
            raise StoreError(f"{path}: connection refused")
        return await self._inner.get(path, max_bytes, offset=offset, size=size)


class Fickle(Unreachable):
    """A store that answers wrongly (two times of three) or not (every other time) for each part of what lies below one
    prefix.
    """

    def __init__(self, inner: MemoryStore, prefix: str, bent: bool) -> None:
        super().__init__(inner, prefix)
        self._bent = bent
        self._asked: Counter[tuple[str, int]] = Counter()

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        data = await self._inner.get(path, max_bytes, offset=offset, size=size)
        if not path.startswith(self._prefix):
            return data
        self._asked[path, offset] += 1
        asked = self._asked[path, offset]
        if asked % (3 if self._bent else 2) == 0:
            return data
        if not self._bent:
            raise StoreError(f"{path}: the connection was reset")
        return data[:-1] + bytes([data[-1] ^ 1 << asked % 8])

    @property
    def asked(self) -> int:
        """How often it was asked for anything there."""
        return self._asked.total()


class Blind(Network):
    """A network whose validator cannot read the head from some moment on."""

    hidden = "nothing"

    def node(self, name: str, process: str = "", store: ObjectStore | None = None) -> Node:
        if name.startswith("validator"):
            store = Hidden(self)
        return super().node(name, process, store)


class Hidden(Unreachable):
    """A store in which what a network hides cannot be read."""

    def __init__(self, network: Blind) -> None:
        super().__init__(network.store, "")
        self._network = network

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if path == self._network.hidden:
            raise StoreError(f"{path}: connection refused")
        return await self._inner.get(path, max_bytes, offset=offset, size=size)


class Apart(Network):
    """A network whose trainer cannot reach the first miner's batches."""

    def node(self, name: str, process: str = "", store: ObjectStore | None = None) -> Node:
        if process == "/download":
            store = Unreachable(self.store, paths.kind_prefix(key("miner-1").public, "batches"))
        return super().node(name, process, store)


def test_a_miner_that_cannot_be_reached_holds_up_nobody_and_is_accounted_for_in_the_end():
    async def scenario() -> None:
        network = Apart(CHOICES)
        async with running(network):
            await network.until_window(9)
        collected: dict[str, list[dict[str, Any]]] = {}
        for event in network.events("trainer/download", "collected"):
            collected.setdefault(event["miner"], []).append(event)
        reached = collected[key("miner-2").public.hex()[:8]]
        assert len(reached) >= 6
        assert sum(event["used"] for event in reached) >= 4 * 4
        assert not any(event["used"] for event in collected.get(key("miner-1").public.hex()[:8], []))
        assert (await network.head()).version >= 4  # the trainer goes on learning
        accounts = {}
        async for info in network.states["trainer"].list(OUTCOMES):
            account = WindowOutcomes.from_bytes(await network.states["trainer"].get(info.path, 1 << 20))
            if account.miner == key("miner-1").public:
                accounts[account.window] = {outcome.status for outcome in account.outcomes}
        assert {1, 2} <= accounts.keys()
        assert set.union(*accounts.values()) == {"unreachable"}

    simulate(scenario)


@pytest.mark.parametrize("bent", [True, False], ids=["bent", "no answer"])
def test_answers_that_fail_are_not_held_against_the_miner(bent: bool):
    async def scenario() -> None:
        network = Network(CHOICES)
        prefix = paths.kind_prefix(key("miner-1").public, "batches")
        fickle = Fickle(network.store, prefix, bent)
        network.medium = lambda name, process: fickle if name == "validator-0" else network.store  # type: ignore[method-assign]
        async with running(network):
            await network.until_window(6)
        assert fickle.asked >= 4 * 2 * 3
        judged = await verdicts(network, "miner-1", range(5))
        assert len(judged) >= 3
        assert {judgement.reason for verdict in judged.values() for judgement in verdict.judgements} == {""}

    simulate(scenario)


def test_a_validator_that_cannot_see_a_version_judges_nobody_who_claims_it_and_everybody_else():
    async def scenario() -> None:
        network = Blind(CHOICES)
        async with running(network):
            await network.until_window(5)
            network.hidden = paths.head(key("trainer").public)
            await network.until_window(8)
        log = network.logs["validator-0"]
        assert not any(event["rejected"] for event in log.named("verdict"))
        assert {event["window"] for event in log.named("not-judged")} >= {6, 7}
        assert not log.named("window-abandoned")

    simulate(scenario)


class Away(Unreachable):
    """A store whose batches cannot be read for a while."""

    away = False

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if self.away and "/batches/" in path:
            raise StoreError(f"{path}: the network is unreachable")
        return await self._inner.get(path, max_bytes, offset=offset, size=size)


def test_an_outage_of_a_validators_network_costs_no_miner_its_deposit():
    async def scenario() -> None:
        network = Network(CHOICES)
        store = Away(network.store, "")
        network.medium = lambda name, process: store if name == "validator-0" else network.store  # type: ignore[method-assign]
        async with running(network, miners=2):
            await network.until_window(6)
            store.away = True
            await network.until_window(7)
            store.away = False
            await network.until_window(10)
        for miner in ("miner-1", "miner-2"):
            judged = await verdicts(network, miner, range(10))
            assert len(judged) >= 7
            assert not any(item.reason for verdict in judged.values() for item in verdict.judgements)

    simulate(scenario)
