"""Two trainers with valid heads, of which one has stopped or lies: the newest chain that can be fetched is followed."""

from protocol import paths
from tests.support.attacked_nodes.follower import SECOND, AttackedFollower
from tests.support.builders.chains import TRAINER
from tests.support.simulation.virtual_clock import simulated


async def two_trainers() -> AttackedFollower:
    """Return a follower of two trainers, of which the first stopped at version 1 and the other at 3."""
    testbed = AttackedFollower(trainers=(TRAINER.public, SECOND.public))
    await testbed.publish(4)
    await testbed.mirror(SECOND, epoch=1)
    await testbed.put_head(testbed.head(newest=1))
    await testbed.restart()
    return testbed


@simulated
async def test_the_newest_head_goes_first_although_an_older_one_is_valid():
    testbed = await two_trainers()
    await testbed.follow()
    assert testbed.follower.chain.head is not None
    assert testbed.follower.chain.head.version == 3


@simulated
async def test_an_older_head_is_followed_while_the_newest_cannot_be_fetched():
    testbed = await two_trainers()
    digest = testbed.chain.signed_manifests[3].digest
    await testbed.store.delete(paths.manifest(SECOND.public, 3, digest))
    await testbed.follow()
    assert testbed.follower.chain.head is not None
    assert testbed.follower.chain.head.version == 1
