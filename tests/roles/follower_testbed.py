"""A store with a small chain, and a miner's node that follows it."""

from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.digest import digest_weights
from protocol.patch import NewTensors
from roles.policy.follower import Follower
from roles.ports import ObjectStore
from tests.support.builders.chains import TRAINER, Chain, change_elements, make_node, small_run, small_weights
from tests.support.simulation.network import BEGIN, Log

HOUR_MS = 3_600_000


class FollowerTestbed:
    """A store with a chain, and a miner's node that follows it."""

    def __init__(self) -> None:
        self.store, self.state, self.log = MemoryStore(), MemoryStore(), Log("miner")
        self.genesis = small_weights(0)
        self.run_id, self.run = small_run(digest_weights(self.genesis))
        self.chain = Chain(self.run_id, self.store, int(BEGIN * 1000) + HOUR_MS)

    async def publish(self, count: int, **options: bool) -> None:
        """Publish version 0 if there is none, then `count` more versions."""
        if not self.chain.signed_manifests:
            await self.chain.publish(self.genesis)
        for _ in range(count):
            await self.chain.publish(change_elements(self.chain.weights[-1], len(self.chain.weights)), **options)

    async def follower(self, store: ObjectStore | None = None, new_tensors: NewTensors | None = None) -> Follower:
        node = make_node(self.run_id, self.run, store or self.store, self.state, self.log)
        return await Follower.open(node, new_tensors=new_tensors)

    def patch_path(self, version: int) -> str:
        ref = self.chain.signed_manifests[version].record.patch
        assert ref is not None
        return paths.patch(TRAINER.public, ref.parts[0].digest)
