"""What each role needs, by the number of miners or of sites: requests, bytes and CPU of a simulated network.

    python -m bench.requests --miners 2,4,8         a trainer, validators and miners; figures of a window
    python -m bench.requests --sites 4,8,16         a coordinator and sites; figures of an outer round

The roles are those of the product, over a store in memory and on a virtual clock. The figures of miners and sites are
means. CPU is that of the tasks of a role, with all that they compute; the policy has 13,440 weights.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import trio
import trio.testing

from bench.tables import print_table
from grailnode.store.decorators.limiting import MeteredStore
from roles.node.identity import Node
from roles.ports import ObjectStore
from tests.support.builders.recipes import demo_rules
from tests.support.measuring.store_tally import TallyMeter
from tests.support.simulation.network import BEACON_KEY, Network
from tests.support.simulation.network_runs import run_nodes
from tests.support.simulation.outer_sites import OuterTestbed

_SETTLE = 2
"""Windows or rounds before those that are measured."""

_role: ContextVar[str] = ContextVar("role", default="")


@dataclass(eq=False)
class Usage(trio.abc.Instrument):
    """What the tasks of each role used.

    Attributes:
        meters: of the requests; seconds: of CPU; members: how many processes a role has.
    """

    meters: dict[str, TallyMeter] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    members: Counter[str] = field(default_factory=Counter)
    _begin: float = 0.0

    def join(self, role: str, store: ObjectStore) -> ObjectStore:
        """Count the present task, and those that it starts, to a role, and return its view of the store."""
        _role.set(role)
        self.members[role] += 1
        return MeteredStore(store, self.meters.setdefault(role, TallyMeter()))

    def clear(self) -> None:
        """Begin to measure."""
        self.seconds.clear()
        for meter in self.meters.values():
            meter.tallies.clear()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Take the time."""
        self._begin = time.process_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Add the time of a step to the role of its task."""
        role = task.context.get(_role, "")
        self.seconds[role] = self.seconds.get(role, 0.0) + time.process_time() - self._begin

    def rows(self, units: float) -> list[list[str]]:
        """Return a row for each role: figures of one member in one of so many units."""
        rows = []
        for role, meter in sorted(self.meters.items()):
            per = units * self.members[role]
            tallies = [(operation, tally) for (operation, _), tally in meter.tallies.items()]
            counts = [sum(tally.count for own, tally in tallies if own == name) for name in ("get", "list", "put")]
            cells = [f"{count / per:.1f}" for count in counts]
            rows.append([role, *cells, f"{sum(tally.bytes for _, tally in tallies) / per / 1000:.1f}"])
            rows[-1].append(f"{self.seconds.get(role, 0.0) / per * 1000:.1f}")
        return rows


class MeasuredNetwork(Network):
    """A network whose nodes count what they use."""

    usage: Usage

    def node(self, name: str, process: str = "", store: ObjectStore | None = None) -> Node:
        role = "miner" if name.startswith("miner-") else name.partition("-")[0] + process
        return super().node(name, process, self.usage.join(role, store or self.medium(name, process)))


class _MeasuredSites(OuterTestbed):
    usage: Usage

    def node(self, log: Any, state: ObjectStore, signing_key: Any, store: ObjectStore | None = None) -> Node:
        role = {"trainer": "coordinator", "reader": ""}.get(log.name, "site")
        return super().node(log, state, signing_key, self.usage.join(role, store or self.store) if role else None)


def of_network(window: float, windows: int, validators: int, miners: int) -> list[list[str]]:
    """Return the rows of a network: figures of a window."""
    usage = Usage()

    async def scenario() -> None:
        network = MeasuredNetwork(demo_rules(groups=4, group_size=8), validators=validators)
        network.usage = usage
        beacon = network.run.beacon
        period_ms = round(window * 1000 / network.run.schedule.rounds)
        network.amend(beacon=BEACON_KEY.chain(period_ms, beacon.genesis_ms), head_ttl=max(30, round(window)))
        async with run_nodes(network, miners=miners):
            await network.until_window(_SETTLE)
            usage.clear()
            await network.until_window(_SETTLE + windows)

    trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0), instruments=[usage])
    return usage.rows(windows)


def of_sites(rounds: int, sites: int) -> list[list[str]]:
    """Return the rows of sites that train together: figures of an outer round."""
    usage = Usage()

    async def scenario() -> None:
        testbed = _MeasuredSites(sites)
        testbed.usage = usage
        async with testbed.running(per_second=2 * sites):
            await testbed.until_round(_SETTLE)
            usage.clear()
            await testbed.until_round(_SETTLE + rounds)

    trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0), instruments=[usage])
    return usage.rows(rounds)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--miners", default="2", help="numbers of miners, one run each")
    parser.add_argument("--sites", default="", help="numbers of sites, one run each, instead of miners")
    parser.add_argument("--window", type=float, default=60.0, help="seconds of a window")
    parser.add_argument("--windows", type=int, default=6, help="windows or rounds that are measured")
    parser.add_argument("--validators", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    name = "sites" if options.sites else "miners"
    rows: Iterator[list[str]] = (
        [str(count), *row]
        for count in map(int, (options.sites or options.miners).split(","))
        for row in (
            of_sites(options.windows, count)
            if options.sites
            else of_network(options.window, options.windows, options.validators, count)
        )
    )
    unit = "round" if options.sites else f"window of {options.window:g} s"
    print_table(f"figures of a {unit}", (name, "role", "get", "list", "put", "KB", "CPU ms"), rows)


if __name__ == "__main__":
    main()
