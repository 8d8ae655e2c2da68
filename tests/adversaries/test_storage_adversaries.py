"""Miners that compute honestly and cheat with storage, in a whole network: none of their work counts, and the work of
honest miners does.
"""

from collections.abc import Awaitable, Callable

import pytest

from grailnode.node.wiring import run_miner
from grailnode.run.creation import Choices
from protocol.judging.verdict import Reason, Verdict
from roles.miner.miner import MinerSettings
from tests.support.adversaries import storage_adversaries
from tests.support.simulation.network import Network, key
from tests.support.simulation.network_runs import run_nodes, verdicts
from tests.support.simulation.virtual_clock import simulate, simulated

CHOICES = Choices(groups=4, group_size=8)
WINDOWS = range(2, 5)


async def run_adversary(network: Network, store_type: type[storage_adversaries.HonestStore]) -> None:
    """Run a miner whose store cheats, until cancelled."""
    store = store_type(network.store, key("adversary"), key("miner-1").public)
    settings = MinerSettings(groups=4, chunk=4, share=0.7, poll_seconds=0.2)
    node = network.node("adversary", store=store)
    await run_miner(node, network.task(node), network.compute, settings)


def run_with_adversary(
    store_type: type[storage_adversaries.HonestStore], check: Callable[[Network], Awaitable[None]]
) -> None:
    """Run a network with one honest miner and one adversary until the end of the windows, then the check."""

    async def scenario() -> None:
        network = Network(CHOICES)
        async with run_nodes(network, miners=1) as nursery:
            nursery.start_soon(run_adversary, network, store_type)
            await network.until_window(WINDOWS.stop + 1)
        assert network.events("adversary", "delivered")
        honest = await verdicts(network, "miner-1", WINDOWS)
        assert len(honest) >= len(WINDOWS) - 1
        assert all(judgement.accepted for verdict in honest.values() for judgement in verdict.judgements)
        await check(network)

    simulate(scenario)


async def adversary_verdicts(network: Network) -> dict[int, Verdict]:
    """Return the verdicts on the adversary, by window."""
    return await verdicts(network, "adversary", WINDOWS)


def test_a_miner_with_an_honest_store_is_accepted() -> None:
    async def check(network: Network) -> None:
        miner_verdicts = await adversary_verdicts(network)
        assert miner_verdicts
        assert all(judgement.accepted for verdict in miner_verdicts.values() for judgement in verdict.judgements)

    run_with_adversary(storage_adversaries.HonestStore, check)


@pytest.mark.parametrize("store_type", [storage_adversaries.LateStore, storage_adversaries.ForeignKeyStore])
def test_a_late_commitment_or_one_by_another_key_is_not_judged(
    store_type: type[storage_adversaries.HonestStore],
) -> None:
    async def check(network: Network) -> None:
        assert not await adversary_verdicts(network)

    run_with_adversary(store_type, check)


@pytest.mark.parametrize(
    ("store_type", "reason"),
    [(storage_adversaries.OverQuotaStore, Reason.QUOTA), (storage_adversaries.SwappingStore, Reason.MALFORMED)],
)
def test_every_group_is_rejected(store_type: type[storage_adversaries.HonestStore], reason: Reason) -> None:
    async def check(network: Network) -> None:
        miner_verdicts = await adversary_verdicts(network)
        assert miner_verdicts
        assert {item.reason for verdict in miner_verdicts.values() for item in verdict.judgements} == {reason.value}

    run_with_adversary(store_type, check)


@simulated
async def test_a_batch_that_is_swapped_after_its_verdict_is_not_trained_on() -> None:
    network = Network(CHOICES)
    network.store = storage_adversaries.LateSwappingStore(network.store, key("miner-2"), b"")  # type: ignore[assignment]
    async with run_nodes(network, miners=2):
        await network.until_window(WINDOWS.stop + 2)
    for miner, is_swapped in (("miner-1", False), ("miner-2", True)):
        miner_verdicts = await verdicts(network, miner, WINDOWS)
        assert all(judgement.accepted for verdict in miner_verdicts.values() for judgement in verdict.judgements)
        name = key(miner).public.hex()
        events = [event for event in network.events("trainer/download", "collected") if name.startswith(event["miner"])]
        assert events
        assert all((event["used"] == 0) == is_swapped for event in events)
