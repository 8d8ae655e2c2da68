"""Miners that do honest work and play with storage, in a whole network: nothing of theirs counts, and nobody else
suffers.
"""

from collections.abc import Awaitable, Callable

import pytest

from grailnode.node.wiring import run_miner
from grailnode.run.creation import Choices
from protocol.judging.verdict import Reason, Verdict
from roles.miner.miner import MinerSettings
from tests.network.test_network import run_nodes, simulate, verdicts
from tests.support.adversaries import storage_adversaries
from tests.support.simulation.network import Network, key

CHOICES = Choices(groups=4, group_size=8)
WINDOWS = range(2, 5)


async def smuggle(network: Network, species: type[storage_adversaries.Honest]) -> None:
    """Mine behind such a store, for ever."""
    store = species(network.store, key("smuggler"), key("miner-1").public)
    settings = MinerSettings(groups=4, chunk=4, share=0.7, poll_seconds=0.2)
    node = network.node("smuggler", store=store)
    await run_miner(node, network.task(node), network.compute, settings)


def played(species: type[storage_adversaries.Honest], check: Callable[[Network], Awaitable[None]]) -> None:
    """A network with one honest miner and one such, to the end of the windows; then the check."""

    async def scenario() -> None:
        network = Network(CHOICES)
        async with run_nodes(network, miners=1) as nursery:
            nursery.start_soon(smuggle, network, species)
            await network.until_window(WINDOWS.stop + 1)
        assert network.events("smuggler", "delivered")
        honest = await verdicts(network, "miner-1", WINDOWS)
        assert len(honest) >= len(WINDOWS) - 1
        assert all(judgement.accepted for verdict in honest.values() for judgement in verdict.judgements)
        await check(network)

    simulate(scenario)


async def found(network: Network) -> dict[int, Verdict]:
    return await verdicts(network, "smuggler", WINDOWS)


def test_behind_an_honest_store_it_is_a_miner_like_any_other() -> None:
    async def check(network: Network) -> None:
        judged = await found(network)
        assert judged
        assert all(judgement.accepted for verdict in judged.values() for judgement in verdict.judgements)

    played(storage_adversaries.Honest, check)


@pytest.mark.parametrize("species", [storage_adversaries.Late, storage_adversaries.AnothersKey])
def test_what_is_late_or_in_anothers_name_is_not_judged_at_all(species: type[storage_adversaries.Honest]) -> None:
    async def check(network: Network) -> None:
        assert not await found(network)

    played(species, check)


@pytest.mark.parametrize(
    ("species", "reason"),
    [(storage_adversaries.OverQuota, Reason.QUOTA), (storage_adversaries.Swapped, Reason.MALFORMED)],
)
def test_every_group_is_rejected(species: type[storage_adversaries.Honest], reason: Reason) -> None:
    async def check(network: Network) -> None:
        judged = await found(network)
        assert judged
        assert {item.reason for verdict in judged.values() for item in verdict.judgements} == {reason.value}

    played(species, check)


def test_a_batch_that_is_swapped_after_its_verdict_is_not_trained_on() -> None:
    async def scenario() -> None:
        network = Network(CHOICES)
        network.store = storage_adversaries.SwappedAfterTheVerdict(network.store, key("miner-2"), b"")  # type: ignore[assignment]
        async with run_nodes(network, miners=2):
            await network.until_window(WINDOWS.stop + 2)
        for miner, swapped in (("miner-1", False), ("miner-2", True)):
            judged = await verdicts(network, miner, WINDOWS)
            assert all(judgement.accepted for verdict in judged.values() for judgement in verdict.judgements)
            name = key(miner).public.hex()
            settled = [
                event for event in network.events("trainer/download", "collected") if name.startswith(event["miner"])
            ]
            assert settled
            assert all((event["used"] == 0) == swapped for event in settled)

    simulate(scenario)
