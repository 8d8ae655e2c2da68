"""A mirror of a trainer's space: whoever reads the copy alone follows the same chain to the same weights."""

import pytest

from grailnode.run import creation
from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.errors import ProtocolError
from roles.policy.follower import Follower
from roles.policy.mirroring import Mirror
from roles.ports import NotFoundError
from tests.support.simulation.network import Network, key
from tests.support.simulation.network_runs import RULES, run_nodes

TRAINER = key("trainer").public


async def test_a_copy_leads_to_the_trainers_weights_also_after_a_restart_of_the_mirror() -> None:
    network, copy = Network(RULES), MemoryStore()
    await creation.publish_files(network.store, TRAINER, creation.model_files(network.policy.directory))
    unknown = paths.patch(TRAINER, bytes(32))
    async with run_nodes(network):
        await network.until_window(3)
        await Mirror(network.node("mirror"), copy).copy()
        await copy.put(unknown, b"of a head that is long past")
        await network.until_window(6)
        restarted = Mirror(network.node("mirror"), copy)
        await restarted.copy()
        assert await copy.get(unknown, 100)  # readers of the copy may still use it
        await network.until_window(7)
        await restarted.copy()
        copied = network.events("mirror", "mirrored")
        digests = []
        for store in (network.store, copy):
            follower = await Follower.open(network.node("reader", store=store))
            await follower.refresh()
            digests.append((await follower.rebuild(copied[-1]["version"])).digest)
    assert digests[0] == digests[1]
    assert copied[0]["version"] < copied[1]["version"] < copied[-1]["version"]
    assert 0 < copied[1]["copied"] < copied[1]["objects"]  # what the copy had already was not fetched again
    names = {info.path async for info in copy.list(paths.writer_prefix(TRAINER))}
    assert unknown not in names
    assert paths.head(TRAINER) in names
    await network.store.delete(paths.head(TRAINER))
    for mirror in (restarted, Mirror(network.node("mirror"), MemoryStore())):
        with pytest.raises(NotFoundError):  # an origin that is gone
            await mirror.copy()


async def test_one_trainers_broken_space_does_not_stop_the_copy_of_another() -> None:
    network, copy, broken = Network(RULES), MemoryStore(), key("broken").public
    authority = network.run.authority.model_copy(update={"trainers": (broken, TRAINER)})
    network.amend(authority=authority)
    await creation.publish_files(network.store, TRAINER, creation.model_files(network.policy.directory))
    await network.store.put(paths.head(broken), b"no head")
    async with run_nodes(network):
        await network.until_window(3)
        with pytest.raises(ProtocolError):
            await Mirror(network.node("mirror"), copy).copy()
    assert await copy.get(paths.head(TRAINER), 1 << 20)
