"""A validator that a revision adds while the run is going on: it judges with the others, and then the quorum rises."""

from typing import Any

from grailnode.run import authority_changes, authority_drafts
from grailnode.run.creation import Choices
from protocol import paths
from roles.authority_updates import refresh_authority
from tests.support.simulation.network import Network, key
from tests.support.simulation.network_runs import run_nodes, summaries
from tests.support.simulation.virtual_clock import simulated

CHOICES = Choices(groups=4, group_size=8)
NEW = "validator-1"


async def revise(network: Network, **changes: Any) -> None:
    """Publish a revision signed by the root."""
    founder = network.node("founder")
    await refresh_authority(founder)
    draft = authority_drafts.propose(founder.revisions, "", **changes).signed_by(key("root"))
    await network.store.put(paths.revision(founder.run_id, draft.revision.number), draft.envelope())


@simulated
async def test_a_new_validator_judges_and_then_both_must_accept():
    network = Network(CHOICES)
    async with run_nodes(network) as nursery:
        await network.until_window(3)
        await revise(network, **authority_changes.grant(network.run.authority, key(NEW).public, "validator"))
        nursery.start_soon(network.run_validator, NEW)
        await network.until_window(7)
        await revise(network, quorum=2)
        await network.until_window(14)
    used_groups = {
        window: sum(
            item["used"] for item in network.events("trainer/download", "collected") if item["window"] == window
        )
        for window in range(12)
    }
    assert all(used_groups[window] == 8 for window in range(1, 12))  # two miners, four groups each; no window is lost
    by_window = {summary.window: summary for summary in await summaries(network, NEW, range(12))}
    assert set(by_window) >= set(range(6, 12))
    assert all(row.accepted == 4 for window in range(6, 12) for row in by_window[window].rows)
    assert not network.logs["trainer/download"].named("validators-disagree")
