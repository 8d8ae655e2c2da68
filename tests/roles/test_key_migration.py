"""A trainer that moves to a new key and is killed before or after any put or delete: the chain moves along, and
followers see one history.
"""

import itertools

import pytest

from protocol import paths
from tests.roles.killed_publisher import killed_at
from tests.roles.publisher_testbed import SUCCESSOR, PublisherTestbed, copy_of, newest
from tests.support.builders.chains import equal
from tests.support.simulation.virtual_clock import simulated

SECONDS = 2.5  # of a start, which waits for less than that for another trainer under its key


class RotatedKeyTestbed(PublisherTestbed):
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
@simulated
async def test_a_migration_that_is_killed_at_any_operation_goes_on(after: bool):
    before = RotatedKeyTestbed()
    await before.prepare()
    for operation in itertools.count():
        testbed = RotatedKeyTestbed()
        testbed.store, testbed.state = await copy_of(before.store), await copy_of(before.state)
        if not await killed_at(testbed, operation, SECONDS, after=after, key=SUCCESSOR):
            break
        await testbed.publish(SECONDS, key=SUCCESSOR)
        version, weights = await newest(*await testbed.follower())
        assert (operation, version) == (operation, 4)
        assert equal(weights, testbed.weights[4])
        versions = [name.partition("-")[0] for name in await testbed.manifests()]
        assert len(versions) == len(set(versions)), f"two manifests for a version after operation {operation}"
    assert operation > 20
