"""Storage that does not answer, and a follower of a chain in it."""

from collections.abc import Callable

import trio

from grailnode.store.memory import MemoryStore
from roles.ports import StoreError
from tests.support.attacked_nodes.follower import HOUR_MS, AttackedFollower
from tests.support.builders.chains import Chain
from tests.support.faults.decorated_store import SlowStore
from tests.support.simulation.network import BEGIN


class HangingStore(SlowStore):
    """Storage that fails for some paths after `seconds`, and counts the reads that it keeps waiting."""

    def __init__(self, seconds: float = 3600.0) -> None:
        super().__init__()
        self.seconds, self.waiting = seconds, 0
        self.hangs: Callable[[str], bool] = lambda path: False

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if self.hangs(path):
            self.waiting += 1
            try:
                await trio.sleep(self.seconds)
            finally:
                self.waiting -= 1
            raise StoreError(f"{path}: no answer")
        return await super().get(path, max_bytes, offset=offset, size=size)


def make_follower_on(store: MemoryStore) -> AttackedFollower:
    testbed = AttackedFollower()
    testbed.store = store
    testbed.chain = Chain(testbed.run_id, store, int(BEGIN * 1000) + HOUR_MS)
    testbed.node = testbed.new_node()
    return testbed


async def follow_chain_on(store: MemoryStore, versions: int = 3) -> AttackedFollower:
    """Return a testbed that follows a chain in this store and has its newest weights."""
    testbed = make_follower_on(store)
    await testbed.publish(versions + 1)
    await testbed.restart()
    await testbed.follow()
    return testbed
