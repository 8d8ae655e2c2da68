"""What each role needs, by the number of miners or of sites: requests, bytes and CPU of a simulated network.

    python -m bench.requests --miners 2,4,8         a trainer, validators and miners; figures of a window
    python -m bench.requests --sites 4,8,16         a coordinator and sites; figures of an outer round
    python -m bench.requests --sites 1000 --crowd   likewise, and all sites but three are one task that only contributes

The roles are those of the product, over a store in memory and on a virtual clock. The figures of miners and sites are
means. CPU is that of the tasks of a role, with all that they compute; the policy has 13,440 weights.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import trio
import trio.testing

from bench.tables import print_table
from grailnode.store.decorators.limiting import MeteredStore
from protocol import paths
from protocol.encoding import content_digest
from protocol.identity.signing import sign
from protocol.outer.local_work import encode_work, with_masters
from protocol.outer.round_checks import sender_digest
from protocol.outer.round_records import RoundContribution
from roles.node.identity import Node
from roles.ports import ObjectStore
from tests.support.builders.recipes import demo_rules
from tests.support.measuring.memory import resident
from tests.support.measuring.store_tally import TallyMeter
from tests.support.simulation.network import BEACON_KEY, Network, key
from tests.support.simulation.network_runs import run_nodes
from tests.support.simulation.outer_sites import OuterTestbed, target_weights

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


async def _contribute(testbed: OuterTestbed, names: Sequence[str]) -> None:
    """Send a contribution of each of some sites to every round: what one of the others has changed, and noise."""
    first, seed = next(iter(testbed.handles.values())), 0
    await testbed.until(lambda: first.site is not None and first.site.shared is not None)
    site = first.site
    assert site is not None
    while True:
        assert site.shared is not None
        opening, shared = site._opening, site.shared
        rules, number = opening.record.rules, opening.record.number + 1
        for name in names:
            seed += 1
            torch.manual_seed(seed)
            own, target = key(name), target_weights()
            local = {n: w + 0.1 * (target[n] - w + 0.1 * torch.randn(w.shape)) for n, w in shared.weights.items()}
            work = encode_work(shared, with_masters({}, local), None, rules, sender_digest(opening.digest, own.public))
            record = RoundContribution(
                run=testbed.run_id, worker=own.public, number=number, opening=opening.digest, state=shared.digests,
                payload=work.reference(), groups=(), local_steps=1, norm=work.norm, feedback=b"", beacon_round=1,
            )  # fmt: skip
            for file in work.payload:
                await testbed.store.put(paths.payload(own.public, number, content_digest(file[:])), bytes(file[:]))
            await testbed.store.put(record.path, sign(record, own))
        while site._opening is opening:
            await trio.sleep(0.1)


def of_sites(rounds: int, sites: int, *, crowd: bool) -> list[list[str]]:
    """Return the rows of sites that train together: figures of an outer round. All of them but three may be a crowd."""
    usage = Usage()

    async def scenario() -> None:
        testbed = _MeasuredSites(sites)
        testbed.usage = usage
        names = testbed.names[: 3 if crowd else sites]
        async with testbed.running(names, per_second=2 * sites) as nursery:
            if crowd:
                nursery.start_soon(_contribute, testbed, testbed.names[3:])
            await testbed.until_round(_SETTLE)
            usage.clear()
            manifest = await testbed.until_round(_SETTLE + rounds)
            memory = resident("VmHWM") / 2**20
            print(f"{sites} sites, {len(manifest.counted)} counted, {memory:.0f} MiB at most", flush=True)

    trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0), instruments=[usage])
    return usage.rows(rounds)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--miners", default="2", help="numbers of miners, one run each")
    parser.add_argument("--sites", default="", help="numbers of sites, one run each, instead of miners")
    parser.add_argument("--crowd", action="store_true", help="let one task contribute for all sites but three")
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
            of_sites(options.windows, count, crowd=options.crowd)
            if options.sites
            else of_network(options.window, options.windows, options.validators, count)
        )
    )
    unit = "round" if options.sites else f"window of {options.window:g} s"
    print_table(f"figures of a {unit}", (name, "role", "get", "list", "put", "KB", "CPU ms"), rows)


if __name__ == "__main__":
    main()
