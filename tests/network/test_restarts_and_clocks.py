"""A node that restarts with a clock that was set back (a machine without a battery, a restored snapshot)."""

from dataclasses import replace

import trio

from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.identity.signing import open_signed
from protocol.judging.ledger import Seal
from roles.node.identity import Node
from roles.ports import ObjectStore
from tests.network.unreachable_store import UnreachableStore
from tests.support.simulation.network import BEGIN, Network, key
from tests.support.simulation.network_runs import CHOICES
from tests.support.simulation.trio_clock import TrioClock
from tests.support.simulation.virtual_clock import simulated


class Behind(TrioClock):
    """A clock that is behind by some seconds."""

    behind = 0.0

    def now(self) -> float:
        return super().now() - self.behind

    async def sleep_until(self, moment: float) -> None:
        await super().sleep_until(moment + self.behind)


class RecordingStore(UnreachableStore):
    """A store that remembers every put."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner, "nothing")
        self.puts: list[tuple[str, bytes]] = []

    async def put(self, path: str, data: bytes) -> None:
        self.puts.append((path, data))
        await super().put(path, data)


class OneClockBehind(Network):
    """A network whose validator has its own clock."""

    validator_clock: Behind

    def node(self, name: str, process: str = "", store: ObjectStore | None = None) -> Node:
        node = super().node(name, process, store)
        return (
            replace(node, clock=self.validator_clock, shared_revisions=node.revisions)
            if name == "validator-0"
            else node
        )


@simulated
async def test_a_restart_with_a_clock_that_was_set_back_seals_no_window_twice():
    network = OneClockBehind(CHOICES)
    network.validator_clock = Behind(BEGIN)
    store = RecordingStore(network.store)
    network.medium = lambda name, process: store if name == "validator-0" else network.store  # type: ignore[method-assign]
    own = key("validator-0").public
    async with trio.open_nursery() as nursery:
        nursery.start_soon(network.run_beacon)
        nursery.start_soon(network.run_trainer)
        nursery.start_soon(network.run_miner, "miner-1")
        with trio.move_on_after(network.run.opening_time(10) - network.clock.now()):
            await network.run_validator("validator-0")
        network.validator_clock.behind = 5 * (network.run.opening_time(1) - network.run.opening_time(0))
        with trio.move_on_after(20.0):
            await network.run_validator("validator-0")
        nursery.cancel_scope.cancel()
    summaries: dict[int, set[bytes]] = {}
    for path, data in store.puts:
        if path.startswith(paths.kind_prefix(own, "seals")):
            seal = open_signed(data, Seal, [own]).record
            summaries.setdefault(seal.window, set()).add(seal.summary)
    assert len(summaries) >= 9
    assert all(len(digests) == 1 for digests in summaries.values())
