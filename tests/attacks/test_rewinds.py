"""Rewinds after a theft: a node that followed the thief goes back to the honest chain when it learns of it."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import trio

from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.digest import Weights
from protocol.errors import ProtocolError
from protocol.identity.authority import ChainPoint
from protocol.identity.signing import SigningKey, sign
from protocol.rollout.sampling import SamplingParams
from roles.authority_updates import refresh_authority
from roles.policy.serving import keep_fresh, serve
from roles.ports import EngineError, Forward, Generation, Request, StoreError
from tests.attacks.test_hanging_places import Hanging, holding_on
from tests.roles.test_follower import equal
from tests.support.attacks.target import ROOTS, SECOND, SUCCESSOR, Target, attack, holding
from tests.support.builders.chains import TRAINER, changed


async def honest_from(target: Target, version: int, newest: int) -> None:
    """Replace what the thief published after a version by honest versions up to `newest`."""
    target.chain.signed = target.chain.signed[: version + 1]
    target.chain.weights = target.chain.weights[: version + 1]
    while len(target.chain.signed) <= newest:
        await target.chain.publish(changed(target.chain.weights[-1], 1000 + len(target.chain.weights)), head=False)


def point(target: Target, version: int) -> ChainPoint:
    """Return a version of the chain as it is now."""
    return ChainPoint(version=version, digest=target.chain.signed[version].digest)


async def rewind(target: Target, version: int, successor: SigningKey) -> None:
    """Revoke the trainer, rewind the chain to a version, and publish it under another key."""
    await target.revise(trainers=(successor.public,), revoked=(TRAINER.public,), rewind=point(target, version))
    await target.mirror(successor, epoch=1, revision=1)


class PlainEngine:
    """An engine without a model that only stores the weights that it serves."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.weights: Weights = {}
        self._staged: tuple[int, Weights] = (0, {})

    async def stage(self, version: int, weights: Weights) -> None:
        await trio.lowlevel.checkpoint()
        self._staged = version, weights

    async def commit(self) -> None:
        await trio.lowlevel.checkpoint()
        self.version, self.weights = self._staged

    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        raise EngineError("no model")

    async def greedy(self, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> list[tuple[int, ...]]:
        raise EngineError("no model")

    async def forward(
        self, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]
    ) -> list[Forward]:
        raise EngineError("no model")


async def hang(store: Hanging, *hanging_paths: str) -> None:
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


@attack
async def test_a_node_that_learns_of_two_rewinds_at_once():
    target = await holding()
    await target.publish()  # the first thief's
    await target.follow()
    await honest_from(target, 3, 5)
    first = target.next_revision(trainers=(SUCCESSOR.public,), revoked=(TRAINER.public,), rewind=point(target, 3))
    await target.store.put(paths.revision(target.run_id, 1), sign(first, *ROOTS[:2]))
    late_node, target.node = target.node, target.new_node(state=MemoryStore())
    await refresh_authority(target.node)  # the author of the second revision knows the first
    await target.revise(
        trainers=(SECOND.public,),
        revoked=tuple(sorted((TRAINER.public, SUCCESSOR.public))),
        rewind=point(target, 5),
    )
    target.node = late_node
    await target.mirror(SECOND, epoch=1, revision=2)
    await refresh_authority(target.node)
    assert target.node.revisions.number == 2
    await target.goes_on()


@attack
async def test_a_rewind_to_a_version_newer_than_the_followed_fork():
    target = await holding()
    await target.publish()  # the thief's, shown to this node alone
    await target.follow()
    await honest_from(target, 3, 6)
    await rewind(target, 6, SUCCESSOR)
    await refresh_authority(target.node)
    await target.goes_on()


@attack
async def test_the_engine_replaces_the_thiefs_weights_by_the_honest_ones_of_that_version():
    target = await holding()
    await target.publish()  # the thief's
    engine = PlainEngine()
    await target.follow()
    await serve(target.node, engine, await target.follower.rebuild(4))
    await honest_from(target, 3, 4)
    await rewind(target, 3, SUCCESSOR)
    await refresh_authority(target.node)
    await target.goes_on()
    await serve(target.node, engine, await target.follower.rebuild(4))
    assert engine.version == 4
    assert equal(engine.weights, target.chain.weights[4])


@attack
async def test_a_rewind_that_arrives_while_a_head_is_being_fetched():
    store = InterruptingStore()
    target = await holding_on(store)
    await target.publish()  # the thief's
    await target.follow()
    await honest_from(target, 3, 4)
    await rewind(target, 3, SECOND)
    await store.delete(paths.head(TRAINER.public))
    store.actions[paths.head(SECOND.public)] = lambda: refresh_authority(target.node)
    await target.follower.refresh()
    assert target.node.revisions.number == 1
    assert (await target.follower.rebuild(4)).digest == target.chain.signed[4].record.weights


async def successor_takes_over(target: Target) -> None:
    """Rewind the chain to version 3 under another trainer, and let the node learn of it."""
    await honest_from(target, 3, 3)
    await rewind(target, 3, SUCCESSOR)
    await refresh_authority(target.node)


class UncancellableStore(MemoryStore):
    """Storage of which one read takes some seconds and cannot be cancelled, like a read in a thread."""

    slow_path = ""

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        data = await super().get(path, max_bytes, offset=offset, size=size)
        if path == self.slow_path:
            self.slow_path = ""
            with trio.CancelScope(shield=True):
                await trio.sleep(8)
        return data


@attack
async def test_a_rewind_during_an_uncancellable_read_of_the_thiefs_patch():
    store = UncancellableStore()
    target = await holding_on(store)
    await target.publish()  # the thief's
    await target.follower.refresh()
    store.slow_path = target.patch_path(4)
    errors: list[ProtocolError] = []

    async def rebuild() -> None:
        try:
            await target.follower.rebuild(4)
        except ProtocolError as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(rebuild)
        await trio.sleep(1)
        await successor_takes_over(target)
        await target.follower.refresh()
    assert ["rewound" in str(error) for error in errors] == [True]
    await target.goes_on()


@attack
async def test_a_revoked_trainers_hanging_patches_do_not_keep_a_follower_busy():
    store = Hanging()
    target = await holding_on(store)
    await target.publish(3)  # the thief's
    await hang(store, target.patch_path(5), target.patch_path(6))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_fresh, target.node, target.follower, 1.0)
        await trio.sleep(5)
        assert target.follower.version_for(6) == 6  # by the thief's chain
        await successor_takes_over(target)
        await trio.sleep(60)
        assert target.follower.version_for(6) == 3
        nursery.cancel_scope.cancel()


@attack
async def test_a_rewind_does_not_wait_for_a_hanging_patch_of_the_thief():
    store = Hanging()
    target = await holding_on(store)
    await target.publish()  # the thief's
    await target.restart()  # without weights in memory
    await target.follower.refresh()
    await hang(store, target.patch_path(4))

    async def rebuild() -> None:
        with suppress(StoreError, ProtocolError):
            await target.follower.rebuild(4)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(rebuild)
        await trio.sleep(1)
        await successor_takes_over(target)
        with trio.fail_after(60):
            await target.follower.refresh()
            await target.goes_on()
        nursery.cancel_scope.cancel()
