"""Key compromise: what a thief can do with one key, how soon a revocation ends it, and the rewind that follows."""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from grailnode.library import followed_run
from grailnode.store.memory import MemoryStore
from protocol import limits, paths
from protocol.digest import Weights
from protocol.errors import ProtocolError
from protocol.identity.admission import Invite, do_work
from protocol.identity.signing import SigningKey, sign
from roles.authority_updates import POLL_SECONDS, poll_authority, refresh_authority
from roles.node.identity import Node
from roles.policy.serving import keep_fresh, serve
from tests.support.attacked_nodes.follower import (
    ROOTS,
    SECOND,
    STRANGER,
    SUCCESSOR,
    VALIDATOR,
    AttackedFollower,
    follow_chain,
)
from tests.support.builders import samples
from tests.support.builders.chains import MINER, TRAINER, change_elements, equal
from tests.support.faults.decorated_store import HangingStore
from tests.support.simulation.virtual_clock import running


async def test_keys_a_revoked_trainer_is_refused_within_one_poll():
    testbed = await follow_chain()
    async with running(poll_authority, testbed.node):
        await trio.sleep(0.5)
        await testbed.revise(trainers=(SECOND.public,), revoked=(TRAINER.public,))
        await trio.sleep(POLL_SECONDS)
        await testbed.publish()  # the thief goes on
        await testbed.mirror(SECOND, newest=3, epoch=1, revision=1)
        await testbed.follower.refresh()
    assert testbed.head_version == 3
    assert testbed.follower.version_for(3) == 3


async def test_keys_a_revoked_trainers_manifests_are_refused():
    testbed = await follow_chain(1)
    await testbed.restart_without_state()
    await testbed.mirror(SECOND, epoch=1, revision=1)
    thiefs_manifest = sign(testbed.chain.signed_manifests[0].record, TRAINER)
    await testbed.store.put(paths.manifest(SECOND.public, 0, testbed.chain.signed_manifests[0].digest), thiefs_manifest)
    await testbed.revise(trainers=(SECOND.public,), revoked=(TRAINER.public,))
    await refresh_authority(testbed.node)
    await testbed.assert_refuses("not signed by keys that may sign it")


TWO_MUST_SIGN = "signed by [01] roots? where 2 must sign"
THEFT = {"trainers": (STRANGER.public,)}
FALSE_REVISIONS: dict[str, tuple[tuple[SigningKey, ...], dict[str, Any], str]] = {  # signers, changes, refusal
    "signed by one root": ((ROOTS[0],), THEFT, TWO_MUST_SIGN),
    "signed by all online keys": ((TRAINER, SECOND, VALIDATOR), THEFT, TWO_MUST_SIGN),
    "signed by a key too many": (
        (*ROOTS[:2], STRANGER),
        {"revoked": (MINER.public,)},
        "signed by a key that is no root",
    ),
    "a number too high": (ROOTS[:2], {"number": 4096}, "revision 4096 stands in its place"),
    "of another run": (ROOTS[:2], {"run": samples.digest("another run")}, "of another run"),
}


@pytest.mark.parametrize("is_copy", [False, True], ids=["at the meeting point", "at a validator"])
@pytest.mark.parametrize(("signers", "changes", "refusal"), FALSE_REVISIONS.values(), ids=FALSE_REVISIONS)
async def test_keys_a_false_revision_is_refused(
    signers: tuple[SigningKey, ...], changes: dict[str, Any], refusal: str, is_copy: bool
) -> None:
    testbed = await follow_chain()
    await testbed.revise(*signers, at=paths.revision_copy(VALIDATOR.public, 1) if is_copy else "", **changes)
    await testbed.assert_refuses_revision(refusal)
    await testbed.publish()
    await testbed.assert_follows()


async def test_keys_a_revision_larger_than_its_limit_is_refused():
    testbed = await follow_chain()
    await testbed.store.put(paths.revision(testbed.run_id, 1), bytes(4 * limits.MAX_RUN_BYTES))
    await testbed.assert_refuses_revision("revisions/.*: 2097152 bytes where at most")
    await testbed.assert_follows()


async def test_keys_roots_that_were_replaced_cannot_revise():
    testbed = await follow_chain()
    new_keys = tuple(SigningKey(bytes([number]) * 32) for number in (211, 212, 213))
    roots = tuple(key.public for key in new_keys)
    await testbed.revise(*ROOTS[:2], *new_keys[:2], roots=roots, revoked=tuple(sorted(key.public for key in ROOTS)))
    await refresh_authority(testbed.node)
    assert testbed.node.authority.roots == roots
    await testbed.revise(*ROOTS, trainers=(STRANGER.public,))
    await testbed.assert_refuses_revision("signed by 0 roots where 2 must sign")
    await testbed.revise(*new_keys[1:], trainers=(SECOND.public,))
    await refresh_authority(testbed.node)
    assert testbed.node.authority.trainers == (SECOND.public,)


async def test_keys_a_stranger_that_announces_itself_as_a_validator():
    testbed = AttackedFollower()
    await testbed.new_node(key=STRANGER).announce("validator", 60.0)
    await testbed.new_node(key=VALIDATOR).announce("validator", 60.0)
    assert await testbed.participants("validator") == [VALIDATOR.public]


async def test_keys_a_revoked_inviters_invitations_end():
    inviter = samples.key("inviter")
    testbed = AttackedFollower(admission=samples.admission(policy="invite", inviters=(inviter.public,)))

    async def token(node: Node) -> bytes:
        return sign(Invite(run=node.run_id, key=node.key.public, expires_ms=1 << 50), inviter)

    await dataclasses.replace(testbed.node, credential=token).announce("miner", 60.0)
    assert await testbed.participants() == [MINER.public]
    await testbed.revise_and_learn(admission=samples.admission(policy="invite"), revoked=(inviter.public,))
    assert await testbed.participants() == []
    assert "no invitation by an inviter of this run" in testbed.logged_error("announcement-refused")


async def test_keys_a_miner_without_proof_of_work_is_refused():
    async def short_work(node: Node) -> bytes:
        return do_work(node.run_id, STRANGER.public, 12, int(node.clock.now() * 1000) + 1000).to_bytes()

    testbed = AttackedFollower(admission=samples.admission(credential="work", difficulty=12))
    await dataclasses.replace(testbed.node, credential=short_work).announce("miner", 60.0)
    assert await testbed.participants() == []
    assert "zero bits" in testbed.logged_error("announcement-refused")


async def test_keys_refused_junk_is_not_fetched_again_at_once():
    testbed = AttackedFollower()
    junk = [samples.key(str(number)).public for number in range(20)]
    for key in junk:
        await testbed.store.put(paths.participant(key), b"junk")
    for _ in range(5):
        await testbed.participants()
    assert len(testbed.log.named("announcement-refused")) == len(junk)
    await trio.sleep(11.0)
    await testbed.participants()
    assert len(testbed.log.named("announcement-refused")) == 2 * len(junk)


# Rewinds after a theft: a node that followed the thief goes back to the honest chain when it learns of it


async def honest_from(testbed: AttackedFollower, version: int, newest: int) -> None:
    """Replace what the thief published after a version by honest versions up to `newest`."""
    del testbed.chain.signed_manifests[version + 1 :], testbed.chain.weights[version + 1 :]
    while len(testbed.chain.signed_manifests) <= newest:
        await testbed.chain.publish(
            change_elements(testbed.chain.weights[-1], 1000 + len(testbed.chain.weights)), head=False
        )


class PlainEngine:
    """An engine without a model that only stores the weights that it serves."""

    version: int | None = None
    weights: Weights
    takes_patches = False

    async def stage(self, version: int, weights: Weights) -> None:
        self._staged = version, weights

    async def commit(self) -> None:
        self.version, self.weights = self._staged


async def hang(store: HangingStore, *hanging_paths: str) -> None:
    """Make every fetch of these objects hang."""
    for path in hanging_paths:
        await store.delete(path)
    store.hangs = hanging_paths.__contains__


class InterruptingStore(MemoryStore):
    """Storage that runs an action before it first answers for some paths."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: dict[str, Callable[[], Awaitable[object]]] = {}

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if (action := self.actions.pop(path, None)) is not None:
            await action()
        return await super().get(path, max_bytes, offset=offset, size=size)


async def test_a_node_that_learns_of_two_rewinds_at_once():
    testbed = await follow_chain()
    await testbed.publish()  # the first thief's
    await testbed.follow()
    await honest_from(testbed, 3, 5)
    first = testbed.next_revision(trainers=(SUCCESSOR.public,), revoked=(TRAINER.public,), rewind=testbed.point(3))
    await testbed.store.put(paths.revision(testbed.run_id, 1), sign(first, *ROOTS[:2]))
    late_node, testbed.node = testbed.node, testbed.new_node(state=MemoryStore())
    await refresh_authority(testbed.node)  # the author of the second revision knows the first
    revoked = tuple(sorted((TRAINER.public, SUCCESSOR.public)))
    await testbed.revise(trainers=(SECOND.public,), revoked=revoked, rewind=testbed.point(5))
    testbed.node = late_node
    await testbed.mirror(SECOND, epoch=1, revision=2)
    await refresh_authority(testbed.node)
    assert testbed.node.revisions.number == 2
    await testbed.assert_follows()


async def test_a_rewind_to_a_version_newer_than_the_followed_fork():
    testbed = await follow_chain()
    await testbed.publish()  # the thief's, shown to this node alone
    await testbed.follow()
    await honest_from(testbed, 3, 6)
    await testbed.rewind(6, SUCCESSOR)
    await refresh_authority(testbed.node)
    await testbed.assert_follows()


async def test_the_engine_replaces_the_thiefs_weights_by_the_honest_ones_of_that_version():
    testbed = await follow_chain()
    await testbed.publish()  # the thief's
    engine: Any = PlainEngine()
    await testbed.follow()
    await serve(testbed.node, engine, await testbed.follower.rebuild(4))
    await honest_from(testbed, 3, 4)
    await testbed.rewind(3, SUCCESSOR)
    await refresh_authority(testbed.node)
    await testbed.assert_follows()
    await serve(testbed.node, engine, await testbed.follower.rebuild(4))
    assert engine.version == 4
    assert equal(engine.weights, testbed.chain.weights[4])


async def test_a_rewind_that_arrives_while_a_head_is_being_fetched():
    store = InterruptingStore()
    testbed = await follow_chain(store=store)
    await testbed.publish()  # the thief's
    await testbed.follow()
    await honest_from(testbed, 3, 4)
    await testbed.rewind(3, SECOND)
    await store.delete(paths.head(TRAINER.public))
    store.actions[paths.head(SECOND.public)] = lambda: refresh_authority(testbed.node)
    await testbed.follower.refresh()
    assert testbed.node.revisions.number == 1
    assert (await testbed.follower.rebuild(4)).digest == testbed.chain.signed_manifests[4].record.weights


async def successor_takes_over(testbed: AttackedFollower) -> None:
    """Rewind the chain to version 3 under another trainer, and let the node learn of it."""
    await honest_from(testbed, 3, 3)
    await testbed.rewind(3, SUCCESSOR)
    await refresh_authority(testbed.node)


async def sleep_uncancellably() -> None:
    """Take some seconds like a read in a thread, which cannot be cancelled."""
    with trio.CancelScope(shield=True):
        await trio.sleep(8)


async def test_a_rewind_during_an_uncancellable_read_of_the_thiefs_patch():
    store = InterruptingStore()
    testbed = await follow_chain(store=store)
    await testbed.publish()  # the thief's
    await testbed.follower.refresh()
    store.actions[testbed.patch_path(4)] = sleep_uncancellably
    errors: list[ProtocolError] = []

    async def rebuild() -> None:
        try:
            await testbed.follower.rebuild(4)
        except ProtocolError as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(rebuild)
        await trio.sleep(1)
        await successor_takes_over(testbed)
        await testbed.follower.refresh()
    assert ["rewound" in str(error) for error in errors] == [True]
    await testbed.assert_follows()


async def test_a_revoked_trainers_hanging_patches_do_not_keep_a_follower_busy():
    store = HangingStore()
    testbed = await follow_chain(store=store)
    await testbed.publish(3)  # the thief's
    await hang(store, testbed.patch_path(5), testbed.patch_path(6))
    async with running(keep_fresh, testbed.node, testbed.follower, 1.0):
        await trio.sleep(5)
        assert testbed.follower.version_for(6) == 6  # by the thief's chain
        await successor_takes_over(testbed)
        await trio.sleep(60)
        assert testbed.follower.version_for(6) == 3


@pytest.mark.parametrize("kind", ["manifest", "patch"])
async def test_a_revoked_trainer_that_hangs_does_not_keep_a_program_busy(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HangingStore()
    testbed = await follow_chain(store=store)
    monkeypatch.setattr(followed_run, "open_config_to_read", lambda run: run)
    monkeypatch.setattr(followed_run, "make_spectator", lambda config: testbed.node)
    versions = followed_run.follow_async("run", report=lambda line: None)
    assert (await anext(versions)).number == 3
    await testbed.publish()  # the thief's
    await hang(store, testbed.manifest_path(4) if kind == "manifest" else testbed.patch_path(4))
    found: list[followed_run.FollowedVersion] = []

    async def follow() -> None:
        found.append(await anext(versions))

    async with running(follow):
        await trio.sleep(5)
        await honest_from(testbed, 3, 4)
        await testbed.rewind(3, SUCCESSOR)
        await trio.sleep(70)
    assert [version.digest for version in found] == [testbed.chain.signed_manifests[4].record.weights]


# Two trainers with valid heads, of which one has stopped or lies: the newest chain that can be fetched is followed


@pytest.mark.parametrize(("is_newest_there", "followed"), [(True, 3), (False, 1)])
async def test_the_newest_head_goes_first_although_an_older_one_is_valid(is_newest_there: bool, followed: int) -> None:
    """Of two trainers the first has stopped at version 1. It is followed while the other's cannot be fetched."""
    testbed = AttackedFollower(trainers=(TRAINER.public, SECOND.public))
    await testbed.publish(4)
    await testbed.mirror(SECOND, epoch=1)
    await testbed.put_head(testbed.head(newest=1))
    await testbed.restart()
    if not is_newest_there:
        await testbed.store.delete(paths.manifest(SECOND.public, 3, testbed.chain.signed_manifests[3].digest))
    await testbed.follow()
    assert testbed.head_version == followed
