"""A trainer that moves to a new key, killed before and after every single put and delete: the chain comes along, in one history."""

import itertools

import pytest
import trio
from trio.testing import MockClock

from protocol import paths
from roles.ports import ObjectStore
from tests.network.tripwire import TrippingStore, Tripwire
from tests.roles.test_follower import equal
from tests.roles.test_publisher import SUCCESSOR, Site, copy_of, newest

SECONDS = 2.5  # of a start; longer than it waits for another trainer to show itself


class Moving(Site):
    """A trainer whose key has been replaced, and which has not started since."""

    async def prepare(self) -> None:
        await self.snapshot(0, 1, 2, 3)
        await self.publish(SECONDS)
        await self.revise(1, self.run_id, trainers=(SUCCESSOR.public,))
        await self.snapshot(4)

    async def killed_at(self, operation: int, *, after: bool) -> bool:
        """Start under the new key and die at a put or delete; whether it came to that."""
        died = False
        scope = trio.CancelScope()

        async def strike() -> None:
            nonlocal died
            died = True
            scope.cancel()
            await trio.sleep_forever()

        wire = Tripwire(lambda name, path: name in {"put", "delete"}, operation, after, strike)
        store, state = self.store, self.state
        self.store, self.state = _tripping(store, wire), _tripping(state, wire)
        with scope:
            await self.publish(SECONDS, key=SUCCESSOR)
        self.store, self.state = store, state
        return died

    async def manifests(self) -> list[str]:
        prefix = paths.manifests(SUCCESSOR.public)
        return [item.path.removeprefix(prefix) async for item in self.store.list(prefix)]


def _tripping(store: ObjectStore, wire: Tripwire):
    return TrippingStore(store, wire)


@pytest.mark.parametrize("after", [False, True])
def test_a_rotation_killed_at_any_operation_goes_on_where_it_was(after: bool):
    async def scenario() -> None:
        before = Moving()
        await before.prepare()
        for operation in itertools.count():
            site = Moving()
            site.store, site.state = await copy_of(before.store), await copy_of(before.state)
            if not await site.killed_at(operation, after=after):
                break
            await site.publish(SECONDS, key=SUCCESSOR)
            version, weights = await newest(*await site.follower())
            assert (operation, version) == (operation, 4)
            assert equal(weights, site.weights[4])
            versions = [name.partition("-")[0] for name in await site.manifests()]
            assert len(versions) == len(set(versions)), f"two manifests for a version after operation {operation}"
        assert operation > 20

    trio.run(scenario, clock=MockClock(autojump_threshold=0))
