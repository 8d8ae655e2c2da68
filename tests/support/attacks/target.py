"""A node that holds a good version, and a storage that does to it what an attacker likes."""

import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.chain.manifest import Head, Manifest
from protocol.digest import Weights, content_digest, digest_weights
from protocol.errors import ProtocolError
from protocol.identity.authority import Authority, Revision
from protocol.identity.signing import Signed, SigningKey, open_announced, sign
from protocol.run import RunManifest
from roles.authority_updates import load_authority, refresh_authority
from roles.node.identity import Node
from roles.policy.follower import TRUST_PATH, Follower
from roles.policy.serving import keep_fresh
from roles.ports import StoreError
from tests.roles.test_follower import equal
from tests.support.builders.chains import MINER, TRAINER, Chain, changed, make_node, small_run, small_weights
from tests.support.builders.samples import revision
from tests.support.simulation.network import BEGIN, Log
from tests.support.simulation.trio_clock import TrioClock

ROOTS = tuple(SigningKey(bytes([number]) * 32) for number in (201, 202, 203))
SECOND, VALIDATOR, STRANGER, SUCCESSOR = (SigningKey(bytes([number]) * 32) for number in (11, 12, 13, 14))
HOUR_MS = 3_600_000


def attack(scenario: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """A test on a virtual clock."""

    def test() -> None:
        trio.run(scenario, clock=MockClock(autojump_threshold=0))

    test.__name__ = scenario.__name__
    test.__doc__ = scenario.__doc__
    return test


def founded(genesis: bytes, **changes: Any) -> tuple[bytes, RunManifest]:
    """A run of two of three roots, two trainers and a validator."""
    _, run = small_run(genesis)
    fields: dict[str, Any] = {
        "roots": tuple(root.public for root in ROOTS),
        "root_threshold": 2,
        "trainers": (TRAINER.public, SECOND.public),
        "validators": (VALIDATOR.public,),
    }
    authority = Authority(**(dict(run.authority) | fields | changes))
    run = run.model_copy(update={"authority": authority})
    return content_digest(run.to_bytes()), run


class Target:
    """A store, a chain in it, and a miner's node that follows it."""

    def __init__(self, **authority: Any) -> None:
        self.store, self.state, self.log = MemoryStore(), MemoryStore(), Log("miner")
        self.clock = TrioClock(BEGIN)
        self.genesis = small_weights(0)
        self.run_id, self.run = founded(digest_weights(self.genesis), **authority)
        self.chain = Chain(self.run_id, self.store, int(BEGIN * 1000) + HOUR_MS)
        self.node = self.new_node()
        self.follower: Follower

    def new_node(self, state: MemoryStore | None = None, key: SigningKey = MINER, log: Log | None = None) -> Node:
        """A node on this store; its state is the target's unless another is given."""
        return make_node(self.run_id, self.run, self.store, state or self.state, log or self.log, key, clock=self.clock)

    async def publish(self, count: int = 1, **options: Any) -> Manifest:
        """The next versions, honestly."""
        manifest = None
        for _ in range(count):
            weights = changed(self.chain.weights[-1], len(self.chain.weights)) if self.chain.weights else self.genesis
            manifest = await self.chain.publish(weights, **options)
        assert manifest is not None
        return manifest

    async def restart(self) -> None:
        """The node again, from what it remembers."""
        self.node = self.new_node()
        await load_authority(self.node)
        self.follower = await Follower.open(self.node)

    async def cold(self) -> None:
        """A node that remembers nothing."""
        self.state = MemoryStore()
        await self.restart()

    async def follow(self, version: int | None = None) -> Weights:
        """Follow to the newest version, or to one, and hold it."""
        await self.follower.refresh()
        head = self.follower.chain.head
        assert head is not None
        return (await self.follower.rebuild(head.version if version is None else version)).weights

    def head(self, newest: int | None = None, **changes: Any) -> Head:
        """The head of the chain, with changes."""
        newest = len(self.chain.signed) - 1 if newest is None else newest
        fields: dict[str, Any] = {
            "run": self.run_id,
            "epoch": 0,
            "base": 0,
            "manifests": tuple(signed.digest for signed in self.chain.signed[: newest + 1]),
            "anchors": tuple(version for version in self.chain.anchors if version <= newest),
            "oldest_patch": 1,
            "revision": 0,
            "expires_ms": int(self.clock.now() * 1000) + HOUR_MS,
        }
        return Head(**(fields | changes))

    async def show(self, head: Head, *keys: SigningKey, at: SigningKey = TRAINER) -> None:
        """Put a head, signed by the trainer unless by others."""
        await self.store.put(paths.head(at.public), sign(head, *(keys or (TRAINER,))))

    def manifest_path(self, version: int) -> str:
        return paths.manifest(TRAINER.public, version, self.chain.signed[version].digest)

    def patch_path(self, version: int) -> str:
        ref = self.chain.signed[version].record.patch
        assert ref is not None
        return paths.patch(TRAINER.public, ref.object.digest)

    def shard_path(self, version: int) -> str:
        return paths.anchor(TRAINER.public, self.chain.signed[version].record.anchor[0].digest)

    async def bend(self, path: str, change: Callable[[bytes], bytes]) -> None:
        """Change an object's bytes."""
        await self.store.put(path, change(await self.store.get(path, 1 << 30)))

    async def forge(self, **changes: Any) -> Signed[Manifest]:
        """A next manifest with changes, signed by the trainer and listed by its head, as a bad trainer does."""
        last = self.chain.signed[-1]
        fields = dict(last.record) | {"version": last.record.version + 1, "previous": last.digest}
        signed = open_announced(sign(Manifest(**(fields | changes)), TRAINER), Manifest)
        await self.store.put(paths.manifest(TRAINER.public, fields["version"], signed.digest), signed.data)
        self.chain.signed.append(signed)
        await self.show(self.head())
        return signed

    async def mirror(self, key: SigningKey, **changes: Any) -> None:
        """The chain in another trainer's space, signed again by its key."""
        async for item in self.store.list(TRAINER.public.hex() + "/"):
            rest = item.path.removeprefix(TRAINER.public.hex())
            if not rest.startswith(("/head", "/manifests")):
                await self.store.put(key.public.hex() + rest, await self.store.get(item.path, 1 << 30))
        for version, signed in enumerate(self.chain.signed):
            await self.store.put(paths.manifest(key.public, version, signed.digest), sign(signed.record, key))
        await self.show(self.head(**changes), key, at=key)

    def next_revision(self, **changes: Any) -> Revision:
        """The revision behind those that the node knows; changes are of the authority, `rewind` and `number`
        excepted.
        """
        known = self.node.revisions
        own = {name: changes.pop(name) for name in ("rewind", "number", "previous", "run", "note") if name in changes}
        authority = Authority(**(dict(known.current) | changes))
        fields: dict[str, Any] = {
            "number": known.number + 1,
            "previous": known.digest,
            "run": self.run_id,
            "authority": authority,
        }
        return revision(**(fields | own))

    async def revise(self, *keys: SigningKey, at: str = "", **changes: Any) -> Revision:
        """Put the next revision at the meeting point, or at a path, signed by two roots unless by others."""
        record = self.next_revision(**changes)
        data = sign(record, *(keys or ROOTS[:2]))
        await self.store.put(at or paths.revision(self.run_id, self.node.revisions.number + 1), data)
        return record

    async def refuses(self, match: str, polls: int = 3) -> None:
        """Let the node poll: it says one line, and keeps its last good version, on disk too."""
        before = await self._good()
        told = len(self.log.named("cannot-follow"))
        with trio.move_on_after(polls + 0.5):
            await keep_fresh(self.node, self.follower, 1.0)
        lines = [event["error"] for event in self.log.named("cannot-follow")[told:]]
        assert len(lines) == 1, lines
        assert re.search(match, lines[0]) and lines[0].isprintable() and len(lines[0]) < 500, lines[0]
        assert await self._good() == before

    async def refuses_to_hold(self, match: str) -> None:
        """The head is followed, but what it leads to is not what was signed: one line, and the last good version
        stays.
        """
        with suppress(ProtocolError, StoreError):
            await self.follower.refresh()
            await self.follower.prefetch()
        held = self.follower.newest
        assert self.follower.chain.head is not None
        with pytest.raises((ProtocolError, StoreError), match=match) as caught:
            await self.follower.rebuild(self.follower.chain.head.version)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 500
        after = self.follower.newest
        if after is not held:  # it may have come nearer, by versions that verified
            assert after is not None and after.version < self.follower.chain.head.version
            assert equal(after.weights, self.chain.weights[after.version])

    async def _good(self) -> tuple[int, bytes, bytes]:
        held = self.follower.newest
        trust = await self.state.get(TRUST_PATH, 1 << 20) if TRUST_PATH in await self._remembered() else b""
        return (held.version, held.digest, trust) if held is not None else (-1, b"", trust)

    async def _remembered(self) -> set[str]:
        return {item.path async for item in self.state.list("")}

    async def goes_on(self) -> None:
        """The node follows to the newest true version, bit for bit."""
        assert equal(await self.follow(), self.chain.weights[-1])

    async def refuses_revision(self, match: str, event: str = "revision-refused") -> None:
        """Let the node look for revisions: it says why not, and the authority stays."""
        number, told = self.node.revisions.number, len(self.log.named(event))
        await refresh_authority(self.node)
        lines = {found["error"] for found in self.log.named(event)[told:]}
        assert len(lines) == 1, lines
        assert re.search(match, next(iter(lines))), lines
        assert self.node.revisions.number == number


async def holding(versions: int = 3, **authority: Any) -> Target:
    """A target that holds the newest of some versions."""
    target = Target(**authority)
    await target.publish(versions + 1)
    await target.restart()
    await target.follow()
    return target
