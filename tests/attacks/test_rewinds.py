"""Thefts that the roots took back: whoever followed the thief follows the honest chain again, whenever it learns of
that.
"""

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
    """Forget what the thief published behind a version, and go on honestly to `newest`."""
    target.chain.signed = target.chain.signed[: version + 1]
    target.chain.weights = target.chain.weights[: version + 1]
    while len(target.chain.signed) <= newest:
        await target.chain.publish(changed(target.chain.weights[-1], 1000 + len(target.chain.weights)), head=False)


def point(target: Target, version: int) -> ChainPoint:
    """A version as the chain has it now."""
    return ChainPoint(version=version, digest=target.chain.signed[version].digest)


async def rewind(target: Target, version: int, heir: SigningKey) -> None:
    """Revoke the trainer, take the chain back to a version, and show it under another key."""
    await target.revise(trainers=(heir.public,), revoked=(TRAINER.public,), rewind=point(target, version))
    await target.mirror(heir, epoch=1, revision=1)


class PlainEngine:
    """An engine without a model, that knows what it serves."""

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


async def drip(store: Hanging, *dripping: str) -> None:
    """Never come to an end with these objects, of which there is no more than a beginning."""
    for path in dripping:
        await store.delete(path)
    store.hangs = dripping.__contains__


class Meanwhile(MemoryStore):
    """Storage that answers for some paths only after something else has happened, once."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Callable[[], Awaitable[object]]] = {}

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if (happens := self.first.pop(path, None)) is not None:
            await happens()
        return await super().get(path, max_bytes, offset=offset, size=size)


@attack
async def test_two_rewinds_that_are_learned_of_at_once():
    target = await holding()
    await target.publish()  # the first thief's
    await target.follow()
    await honest_from(target, 3, 5)
    first = target.next_revision(trainers=(SUCCESSOR.public,), revoked=(TRAINER.public,), rewind=point(target, 3))
    await target.store.put(paths.revision(target.run_id, 1), sign(first, *ROOTS[:2]))
    away, target.node = target.node, target.new_node(state=MemoryStore())
    await refresh_authority(target.node)  # whoever writes the second revision knows the first
    await target.revise(
        trainers=(SECOND.public,),
        revoked=tuple(sorted((TRAINER.public, SUCCESSOR.public))),
        rewind=point(target, 5),
    )
    target.node = away
    await target.mirror(SECOND, epoch=1, revision=2)
    await refresh_authority(target.node)
    assert target.node.revisions.number == 2
    await target.goes_on()


@attack
async def test_a_rewind_to_a_version_newer_than_the_fork_that_was_followed():
    target = await holding()
    await target.publish()  # the thief's, shown to this node alone
    await target.follow()
    await honest_from(target, 3, 6)
    await rewind(target, 6, SUCCESSOR)
    await refresh_authority(target.node)
    await target.goes_on()


@attack
async def test_the_engine_gives_up_the_thiefs_weights_for_the_honest_ones_of_that_version():
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
async def test_a_rewind_that_is_learned_of_while_a_head_is_on_its_way():
    store = Meanwhile()
    target = await holding_on(store)
    await target.publish()  # the thief's
    await target.follow()
    await honest_from(target, 3, 4)
    await rewind(target, 3, SECOND)
    await store.delete(paths.head(TRAINER.public))
    store.first[paths.head(SECOND.public)] = lambda: refresh_authority(target.node)
    await target.follower.refresh()
    assert target.node.revisions.number == 1
    assert (await target.follower.rebuild(4)).digest == target.chain.signed[4].record.weights


async def successor_takes_over(target: Target) -> None:
    """From version 3 on the chain is another trainer's, and the node has learned of it."""
    await honest_from(target, 3, 3)
    await rewind(target, 3, SUCCESSOR)
    await refresh_authority(target.node)


class Thread(MemoryStore):
    """Storage whose read of a path, once, takes a while and cannot be cancelled, as one in a thread."""

    slow = ""

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        data = await super().get(path, max_bytes, offset=offset, size=size)
        if path == self.slow:
            self.slow = ""
            with trio.CancelScope(shield=True):
                await trio.sleep(8)
        return data


@attack
async def test_a_rewind_while_a_thiefs_patch_is_read_that_cannot_be_cancelled():
    store = Thread()
    target = await holding_on(store)
    await target.publish()  # the thief's
    await target.follower.refresh()
    store.slow = target.patch_path(4)
    refused: list[ProtocolError] = []

    async def hold() -> None:
        try:
            await target.follower.rebuild(4)
        except ProtocolError as error:
            refused.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold)
        await trio.sleep(1)
        await successor_takes_over(target)
        await target.follower.refresh()
    assert ["rewound" in str(error) for error in refused] == [True]
    await target.goes_on()


@attack
async def test_a_revoked_trainer_does_not_keep_a_follower_busy_with_patches_that_drip():
    store = Hanging()
    target = await holding_on(store)
    await target.publish(3)  # the thief's
    await drip(store, target.patch_path(5), target.patch_path(6))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_fresh, target.node, target.follower, 1.0)
        await trio.sleep(5)
        assert target.follower.version_for(6) == 6  # by the thief's chain
        await successor_takes_over(target)
        await trio.sleep(60)
        assert target.follower.version_for(6) == 3
        nursery.cancel_scope.cancel()


@attack
async def test_a_rewind_does_not_wait_for_the_thiefs_patch_that_a_hold_waits_for():
    store = Hanging()
    target = await holding_on(store)
    await target.publish()  # the thief's
    await target.restart()  # with nothing at hand
    await target.follower.refresh()
    await drip(store, target.patch_path(4))

    async def hold() -> None:
        with suppress(StoreError, ProtocolError):
            await target.follower.rebuild(4)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold)
        await trio.sleep(1)
        await successor_takes_over(target)
        with trio.fail_after(60):
            await target.follower.refresh()
            await target.goes_on()
        nursery.cancel_scope.cancel()
