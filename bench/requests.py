"""Requests a second that each role makes of storage, by operation, in a simulated network on a virtual clock.

Run `python -m bench.requests [--window 60] [--windows 6] [--validators 1]`.
"""

import argparse
from collections.abc import Mapping

import trio

from grailnode.store.decorators.metering import MeteredStore
from tests.support.builders.recipes import demo_rules
from tests.support.measuring.store_tally import TallyMeter
from tests.support.simulation.network import BEACON_KEY, Network
from tests.support.simulation.network_runs import run_nodes
from tests.support.simulation.virtual_clock import simulate

_SETTLE_WINDOWS = 2
_PROCESSES = ("trainer/upload", "trainer/download", "validator-0", "miner-1", "miner-2")


def measure(window: float, windows: int, validators: int) -> dict[str, dict[str, float]]:
    """Return the requests a second of each process, by operation, when all nodes have begun."""
    meters = {name: TallyMeter() for name in _PROCESSES}

    async def scenario() -> float:
        network = Network(demo_rules(groups=4, group_size=8), validators=validators)
        beacon = network.run.beacon
        period_ms = round(window * 1000 / network.run.schedule.rounds)
        network.amend(beacon=BEACON_KEY.chain(period_ms, beacon.genesis_ms), head_ttl=max(30, round(window)))
        for name, meter in meters.items():
            network.mediums[name] = MeteredStore(network.store, meter)
        async with run_nodes(network):
            await network.until_window(_SETTLE_WINDOWS)
            for meter in meters.values():
                meter.tallies.clear()
            start = trio.current_time()
            await network.until_window(_SETTLE_WINDOWS + windows)
            return trio.current_time() - start

    seconds = simulate(scenario)
    return {name: _rates(meter, seconds) for name, meter in meters.items()}


def _rates(meter: TallyMeter, seconds: float) -> dict[str, float]:
    rates: dict[str, float] = {}
    for (operation, _), tally in meter.tallies.items():
        rates[operation] = rates.get(operation, 0.0) + tally.count / seconds
    return rates


def table(rates: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a line for each process, in requests a second."""
    operations = sorted({operation for row in rates.values() for operation in row})
    lines = ["process".ljust(18) + "".join(f"{name:>9}" for name in (*operations, "all"))]
    for name, row in rates.items():
        values = [row.get(operation, 0.0) for operation in operations]
        lines.append(name.ljust(18) + "".join(f"{value:9.2f}" for value in (*values, sum(values))))
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--window", type=float, default=60.0, help="seconds of a window")
    parser.add_argument("--windows", type=int, default=6, help="windows that are measured")
    parser.add_argument("--validators", type=int, default=1)
    options = parser.parse_args()
    print("\n".join(table(measure(options.window, options.windows, options.validators))))


if __name__ == "__main__":
    main()
