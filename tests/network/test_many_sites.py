"""Two sites train one policy in a simulated network, from the groups that its miners make and its validators accept."""

import trio

from grailnode.node.wiring import run_coordinator, run_worker
from grailnode.observe.observer import Observer
from roles.trainer.outer.coordinator import CoordinatorSettings
from roles.trainer.outer.site_settings import SiteSettings
from roles.trainer.publish.publisher import PublisherSettings
from tests.support.builders.samples import round_rules
from tests.support.simulation.network import Network, key
from tests.support.simulation.network_runs import CHOICES
from tests.support.simulation.virtual_clock import simulated

SITES = ("site-0", "site-1")


@simulated
async def test_two_sites_publish_one_chain_of_policies() -> None:
    network = Network(CHOICES)
    workers = tuple(sorted(key(name).public for name in SITES))
    network.amend(authority=network.run.authority.model_copy(update={"workers": workers}))
    rounds = CoordinatorSettings(
        rules=round_rules(local_steps=2, quorum=2), beacon_rounds=network.run.schedule.rounds, state_interval=2
    )
    trainer = network.trainer_settings()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(network.run_beacon)
        nursery.start_soon(network.run_validator)
        for miner in ("miner-1", "miner-2"):
            nursery.start_soon(network.run_miner, miner)
        publisher = PublisherSettings(anchor_interval=4)
        nursery.start_soon(run_coordinator, network.node("trainer"), lambda: network.weights, publisher, rounds)
        for name in SITES:
            settings = SiteSettings(groups_per_step=1, upload_seconds=0.5, poll_seconds=0.2)
            node = network.node(name)
            nursery.start_soon(run_worker, node, lambda: network.weights, network.compute, trainer, settings)
        observer = Observer(network.node("observer"), 0)
        with trio.fail_after(600):
            while max([0, *(event["version"] for event in network.events("trainer", "published"))]) < 3:
                await observer.refresh()
                await trio.sleep(0.5)
        await trio.sleep(5)
        await observer.refresh()
        nursery.cancel_scope.cancel()
    tables = [{event["number"]: event["state"] for event in network.events(name, "round-applied")} for name in SITES]
    assert tables[0].keys() == tables[1].keys() and tables[0] == tables[1]
    closed = {event["number"]: event for event in network.events("trainer", "round-closed")}
    assert sum(event["counted"] == 2 for event in closed.values()) >= 3
    assert (await network.head()).version >= 3
    assert max(event["changed"] for event in network.events("trainer", "published")) > 0
    used = [event["groups"] for name in SITES for event in network.events(name, "contributed")]
    assert sum(used) > 6
    state = observer.state()
    assert [row.number for row in state.rounds] == list(range(1, state.rounds[-1].number + 1))
    assert {row.counted for row in state.rounds} <= {0, 2}
    assert state.rounds[-1].version == state.rounds[-1].step >= 3
    assert [site.name for site in state.sites] == sorted(SITES)
    assert all(site.rounds >= 3 and site.steps >= site.rounds and site.payload_bytes > 0 for site in state.sites)
    assert sum(site.groups for site in state.sites) == sum(row.groups for row in state.rounds)
    assert not state.alarms
