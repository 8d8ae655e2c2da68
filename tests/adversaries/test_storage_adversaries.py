"""Miners that compute honestly and cheat with storage, in a whole network: none of their work counts."""

import pytest

from grailnode.node.wiring import run_miner
from protocol import paths
from protocol.identity.signing import open_signed, sign
from protocol.judging.verdict import Reason
from protocol.rollout.batch import Commitment
from roles.miner.miner_settings import MinerSettings
from roles.ports import ObjectStore
from tests.support.builders.recipes import demo_rules
from tests.support.faults.decorated_store import DecoratedStore
from tests.support.simulation.network import Network, key
from tests.support.simulation.network_runs import check_accepted, run_nodes, verdicts
from tests.support.simulation.virtual_clock import simulated

WINDOWS = range(2, 5)
ADVERSARY = key("adversary")


class CheatingStore(DecoratedStore):
    """A store that changes what the adversary puts, which itself reads what it has put.

    Args:
        reason: for which its groups are to be refused: it commits to each group four times, over the quota, or replaces
            the batch by malformed bytes of the same size as soon as the commitment is put.
    """

    def __init__(self, inner: ObjectStore, reason: Reason) -> None:
        super().__init__(inner)
        self.reason = reason
        self.own_puts: dict[str, bytes] = {}

    async def put(self, path: str, data: bytes) -> None:
        self.own_puts[path] = data
        if not path.startswith(paths.kind_prefix(ADVERSARY.public, "commitments")):
            await self.inner.put(path, data)
            return
        commitment = open_signed(data, Commitment, [ADVERSARY.public]).record
        if self.reason is Reason.QUOTA:
            data = sign(commitment.model_copy(update={"groups": commitment.groups * 4}), ADVERSARY)
        await self.inner.put(path, data)
        if self.reason is Reason.MALFORMED:
            batch_path = paths.batch(ADVERSARY.public, commitment.window, commitment.batch)
            await self.inner.put(batch_path, bytes(reversed(self.own_puts[batch_path])))

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if path in self.own_puts:
            return self.own_puts[path][offset:][: size if size is not None else max_bytes]
        return await self.inner.get(path, max_bytes, offset=offset, size=size)


@pytest.mark.parametrize("reason", [Reason.QUOTA, Reason.MALFORMED])
@simulated
async def test_every_group_is_rejected(reason: Reason) -> None:
    network = Network(demo_rules(groups=4, group_size=8))
    node = network.node("adversary", store=CheatingStore(network.store, reason))
    settings = MinerSettings(groups=4, chunk=4, share=0.7, poll_seconds=0.2)
    async with run_nodes(network, miners=1) as nursery:
        nursery.start_soon(run_miner, node, network.task(node), network.compute, settings)
        await network.until_window(WINDOWS.stop + 1)
    await check_accepted(network, "miner-1", WINDOWS, at_least=len(WINDOWS) - 1)
    on_adversary = await verdicts(network, "adversary", WINDOWS)
    assert on_adversary
    assert {item.reason for verdict in on_adversary.values() for item in verdict.judgements} == {reason.value}
