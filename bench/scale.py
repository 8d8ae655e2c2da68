"""What each role needs in a run with thousands of miners: requests, bytes, CPU and memory of a simulated network.

    python -m bench.scale --miners 1000,3000,10000
    python -m bench.scale --parts 1000,10000,100000

Trainer, validators and one miner are those of the product, over a store in memory and on a virtual clock. The other
miners are one task, which announces all of them and delivers a true group of each in every window. The policy has
13,440 weights and stays at version 0. `--junk` adds announcements without a valid signature. `--parts` measures alone,
by the number of announced miners, a validator's looks at their announcements and its accounts of 20 windows, each with
as many of them as a window may have.
"""

import argparse
import random
import time
from functools import partial

import torch
import trio
import trio.testing

from bench.requests import MeasuredNetwork, Usage
from bench.tables import print_table
from grailnode.engine.compute import make_engine
from grailnode.node.wiring import run_collector, run_publisher, run_training
from protocol import limits, paths
from protocol.identity.signing import SigningKey, sign
from protocol.judging.accounts import Accounts
from protocol.rollout.batch import Group, assemble
from roles.miner.produce import HonestProducer, MiningWindow
from roles.participants import find_participants
from roles.trainer.spool import INBOX
from tests.support.builders import samples
from tests.support.builders.recipes import demo_rules
from tests.support.measuring.memory import resident
from tests.support.simulation.network import BEACON_KEY, TrainerSettings, inline, key, randomness

_PART_WINDOWS = 20

_AT_ONCE = 500
"""Miners whose groups are generated together."""


class Crowd:
    """Many miners in one task: each delivers one group in every window."""

    def __init__(self, network: MeasuredNetwork, miners: int) -> None:
        self._network = network
        self._keys = [key(f"crowd {number}") for number in range(miners)]
        self._engine, self._node = make_engine(network.compute, inline), network.node("crowd")
        self._producer = HonestProducer(network.task(self._node), self._engine)
        self._paths: dict[int, list[str]] = {}  # by window, what was put

    async def announce(self, junk: int) -> None:
        """Announce all miners, and junk."""
        store = self._network.store
        template = await self._node.announcement("miner", 1 << 40, 1, 0, self._engine.arithmetic)
        for own_key in self._keys:
            data = sign(template.model_copy(update={"key": own_key.public}), own_key)
            await store.put(paths.participant(own_key.public), data)
        for number in range(junk):
            await store.put(paths.participant(number.to_bytes(32, "big")), data)  # of another key

    async def run(self, windows: int) -> None:
        """Deliver the groups of some windows."""
        await self._engine.stage(0, self._network.weights)
        await self._engine.commit()
        for window in range(windows):
            await self._network.until_window(window)
            for begin in range(0, len(self._keys), _AT_ONCE):
                await self._deliver(window, self._keys[begin : begin + _AT_ONCE])
            for path in self._paths.pop(window - 6, []):  # nobody reads it any more
                await self._network.store.delete(path)
            for item in [item async for item in self._network.states["trainer"].list(INBOX)]:
                await self._network.states["trainer"].delete(item.path)  # no step is made

    async def _deliver(self, window: int, keys: list[SigningKey]) -> None:
        producer, opening = self._producer, randomness(self._network.run.schedule.opening(window))
        windows = [MiningWindow(window, opening, 0, own_key.public) for own_key in keys]
        assignments = [producer.assignments(item, [0])[0] for item in windows]
        generations = await producer.generate(windows[0], assignments)
        for own_key, item, assignment, own in zip(keys, windows, assignments, generations, strict=True):
            group: Group = producer.group(item, assignment, await producer.rollouts(item, assignment, own))
            batch, commitment = assemble([group], self._engine.arithmetic)
            objects = {
                paths.batch(own_key.public, window, commitment.batch): batch,
                paths.commitment(own_key.public, window): sign(commitment, own_key),
            }
            for path, data in objects.items():
                await self._network.store.put(path, data)
            self._paths.setdefault(window, []).extend(objects)


async def _publish_first_version(network: MeasuredNetwork, settings: TrainerSettings) -> None:
    """Train until the first window opens: what would be made of the groups is measured elsewhere."""
    with trio.move_on_at(trio.current_time() + network.run.opening_time(0) - network.clock.now()):
        node = network.node("trainer", "/training")
        learner = partial(network.make_learner, settings.section)
        await run_training(node, learner, lambda: network.weights, settings.section)


def of_crowd(miners: int, junk: int, settle: int, windows: int, validators: int) -> list[list[str]]:
    """Return a row for each role: figures of a window of 60 s."""
    usage, lines = Usage(), []

    async def scenario() -> None:
        network = MeasuredNetwork(demo_rules(groups=1, group_size=2), validators=validators, quorum=1)
        network.usage = usage
        beacon = network.run.beacon
        network.amend(beacon=BEACON_KEY.chain(60_000 // network.run.schedule.rounds, beacon.genesis_ms), head_ttl=3600)
        settings = network.trainer_settings(groups_per_step=1 << 20)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(network.run_beacon)
            crowd = Crowd(network, miners)  # from here on, what this task starts is the crowd's
            await crowd.announce(junk)
            nursery.start_soon(crowd.run, settle + windows + 1)
            nursery.start_soon(_publish_first_version, network, settings)
            nursery.start_soon(network.run_miner, "miner-1", 1)
            for name in network.validators:
                nursery.start_soon(network.run_validator, name, 1.0)
            nursery.start_soon(run_publisher, network.node("trainer", "/upload"), settings.publisher)
            nursery.start_soon(run_collector, network.node("trainer", "/download"), settings.section)
            await network.until_window(settle)
            usage.clear()
            start = time.time()
            await network.until_window(settle + windows)
            used = [event["used"] for event in network.events("trainer/download", "collected")]
            lines.append(f"{sum(used)} groups used, {(time.time() - start) / windows:.1f} s a window")
            nursery.cancel_scope.cancel()

    trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0), instruments=[usage])
    print(f"{miners} miners, {junk} junk: {lines[0]}, {resident('VmHWM') / 2**20:.0f} MiB at most", flush=True)
    return usage.rows(windows)


async def _look(miners: int, junk: int) -> list[str]:
    """Return the figures of looks at announcements: CPU seconds and requests of the first and of a later one."""
    network = MeasuredNetwork(demo_rules())
    network.usage = Usage()
    crowd = Crowd(network, miners)
    await crowd.announce(junk)
    node, meter = network.node("validator-0"), network.usage.meters["validator"]
    cells: list[str] = []
    found = -1
    while (count := len(await find_participants(node, "miner"))) > found:  # until it knows all for which it has places
        found = count
    for _ in range(2):
        meter.tallies.clear()
        await trio.sleep(60.0)
        begin = time.process_time()
        found = len(await find_participants(node, "miner"))
        cells = [str(found), str(sum(tally.count for tally in meter.tallies.values()))]
        cells.append(f"{time.process_time() - begin:.2f}")
    return cells


def of_parts(miners: int, junk: int) -> list[str]:
    """Return the figures of the parts of a validator that know all miners."""
    look = trio.run(_look, miners, junk, clock=trio.testing.MockClock(autojump_threshold=0))
    rng, keys = random.Random(0), [random.Random(number).randbytes(32) for number in range(miners)]
    run = samples.run_manifest()
    accounts, rows = Accounts(run.scoring, run.proof), min(miners, limits.MAX_WINDOW_MINERS)
    seconds = 0.0
    template = samples.row(samples.MINER)
    all_rows = [template.model_copy(update={"miner": miner}) for miner in keys]
    resident_before = resident("VmRSS")
    for window in range(_PART_WINDOWS):
        chosen = tuple(sorted(rng.sample(all_rows, rows), key=lambda row: row.miner))
        summary = samples.summary(window=window).model_copy(update={"rows": chosen})
        begin = time.process_time()
        accounts.add(summary)
        scores, known = accounts.scores(), accounts.clean_windows()
        evidence = [accounts.evidence_of(row.miner, row.arithmetic) for row in chosen]
        seconds = time.process_time() - begin
    assert len(evidence) == rows and len(known) <= miners
    memory = (resident("VmRSS") - resident_before) / 2**20
    return [str(miners), *look, str(rows), str(len(scores)), f"{seconds:.2f}", f"{memory:.0f}"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--miners", default="1000", help="numbers of miners, one run each")
    parser.add_argument("--parts", default="", help="numbers of miners for the parts of a validator alone")
    parser.add_argument("--junk", type=int, default=0, help="announcements that nobody may have made")
    parser.add_argument("--settle", type=int, default=3, help="windows before those that are measured")
    parser.add_argument("--windows", type=int, default=4, help="windows that are measured")
    parser.add_argument("--validators", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.parts:
        parts = (of_parts(int(count), options.junk) for count in options.parts.split(","))
        header = ("announced", "found", "requests", "CPU s", "rows", "scores", "CPU s", "MiB of 20 windows")
        print_table("a look at announcements, and the accounts of a window", header, parts)
        return
    rows = (
        [str(count), *row]
        for count in map(int, options.miners.split(","))
        for row in of_crowd(count, options.junk, options.settle, options.windows, options.validators)
    )
    print_table("figures of a window of 60 s", ("miners", "role", "get", "list", "put", "KB", "CPU ms"), rows)


if __name__ == "__main__":
    main()
