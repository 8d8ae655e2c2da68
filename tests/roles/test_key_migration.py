"""A trainer that moves to a new key and is killed before or after any put or delete: the chain moves along, and
followers see one history.
"""

import itertools

import pytest
import trio
from trio.testing import MockClock

from protocol import paths
from tests.roles.killed_publisher import killed_at
from tests.roles.test_follower import equal
from tests.roles.test_publisher import SUCCESSOR, Site, copy_of, newest

SECONDS = 2.5  # of a start, which waits for less than that for another trainer under its key


class RotatedSite(Site):
    """A trainer whose key has been replaced, and which has not started since."""

    async def prepare(self) -> None:
        await self.snapshot(0, 1, 2, 3)
        await self.publish(SECONDS)
        await self.revise(1, self.run_id, trainers=(SUCCESSOR.public,))
        await self.snapshot(4)

    async def manifests(self) -> list[str]:
        prefix = paths.manifests(SUCCESSOR.public)
        return [item.path.removeprefix(prefix) async for item in self.store.list(prefix)]


@pytest.mark.parametrize("after", [False, True])
def test_a_migration_that_is_killed_at_any_operation_goes_on(after: bool):
    async def scenario() -> None:
        before = RotatedSite()
        await before.prepare()
        for operation in itertools.count():
            site = RotatedSite()
            site.store, site.state = await copy_of(before.store), await copy_of(before.state)
            if not await killed_at(site, operation, SECONDS, after=after, key=SUCCESSOR):
                break
            await site.publish(SECONDS, key=SUCCESSOR)
            version, weights = await newest(*await site.follower())
            assert (operation, version) == (operation, 4)
            assert equal(weights, site.weights[4])
            versions = [name.partition("-")[0] for name in await site.manifests()]
            assert len(versions) == len(set(versions)), f"two manifests for a version after operation {operation}"
        assert operation > 20

    trio.run(scenario, clock=MockClock(autojump_threshold=0))
