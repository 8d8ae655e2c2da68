"""A follower with a good version of the weights, and storage that an attacker controls."""

import re
from contextlib import suppress
from typing import Any

import pytest
import trio

from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.chain.manifest import Head, Manifest
from protocol.digest import Weights, digest_weights
from protocol.encoding import content_digest
from protocol.errors import ProtocolError
from protocol.identity.authority import Authority, ChainPoint, Revision
from protocol.identity.participant import Role
from protocol.identity.signing import Signed, SigningKey, open_announced, sign
from protocol.patch import NewTensors
from protocol.run import RunManifest
from roles.authority_updates import load_authority, refresh_authority
from roles.node.identity import Node
from roles.participants import find_participants
from roles.policy.follower import TRUST_PATH, Follower
from roles.policy.serving import keep_fresh
from roles.ports import NotFoundError, ObjectStore, StoreError
from tests.support.builders.chains import (
    MINER,
    TRAINER,
    Chain,
    change_elements,
    equal,
    make_node,
    small_run,
    small_weights,
)
from tests.support.builders.samples import revision
from tests.support.simulation.network import BEGIN, Log
from tests.support.simulation.virtual_clock import TrioClock

ROOTS = tuple(SigningKey(bytes([number]) * 32) for number in (201, 202, 203))
SECOND, VALIDATOR, STRANGER, SUCCESSOR = (SigningKey(bytes([number]) * 32) for number in (11, 12, 13, 14))
HOUR_MS = 3_600_000


def run_with_two_roots(genesis: bytes, **changes: Any) -> tuple[bytes, RunManifest]:
    """Return the id and the manifest of a run: two of three roots must sign; it has two trainers and a validator."""
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


class AttackedFollower:
    """A store, a chain in it, and a miner's node that follows the chain.

    Args:
        store: the storage; None for a new one.
        authority: fields of the run's authority that differ from the defaults.
    """

    def __init__(self, store: MemoryStore | None = None, **authority: Any) -> None:
        self.store, self.state, self.log = store or MemoryStore(), MemoryStore(), Log("miner")
        self.clock = TrioClock(BEGIN)
        self.genesis = small_weights(0)
        self.run_id, self.run = run_with_two_roots(digest_weights(self.genesis), **authority)
        self.chain = Chain(self.run_id, self.store, int(BEGIN * 1000) + HOUR_MS)
        self.node = self.new_node()
        self.follower: Follower

    def new_node(self, state: MemoryStore | None = None, key: SigningKey = MINER, log: Log | None = None) -> Node:
        """Return a node on this store, by default with the state of the attacked node."""
        return make_node(self.run_id, self.run, self.store, state or self.state, log or self.log, key, clock=self.clock)

    async def new_follower(self, store: ObjectStore | None = None, new_tensors: NewTensors | None = None) -> Follower:
        """Return another follower of this node's state, which may read from another store."""
        node = make_node(self.run_id, self.run, store or self.store, self.state, self.log, MINER, clock=self.clock)
        return await Follower(node, new_tensors=new_tensors).open()

    async def publish(self, count: int = 1, **options: Any) -> Manifest:
        """Publish the next honest versions, and return the manifest of the last one."""
        manifest = None
        for _ in range(count):
            weights = (
                change_elements(self.chain.weights[-1], len(self.chain.weights)) if self.chain.weights else self.genesis
            )
            manifest = await self.chain.publish(weights, **options)
        assert manifest is not None
        return manifest

    async def restart(self) -> None:
        """Restart the node with its state."""
        self.node = self.new_node()
        await load_authority(self.node)
        self.follower = await Follower(self.node).open()

    async def restart_without_state(self) -> None:
        self.state = MemoryStore()
        await self.restart()

    async def follow(self, version: int | None = None) -> Weights:
        """Follow the chain to the newest version, or to another one, and return its weights."""
        await self.follower.refresh()
        return (await self.follower.rebuild(self.head_version if version is None else version)).weights

    @property
    def head_version(self) -> int:
        """The version of the head that the node follows."""
        assert self.follower.chain.head is not None
        return self.follower.chain.head.version

    def logged_error(self, event: str) -> str:
        """Return the error of the only event of a name in the node's log."""
        (line,) = self.log.named(event)
        return str(line["error"])

    async def participants(self, role: Role = "miner") -> list[bytes]:
        """Return the keys of the participants that the node finds."""
        return [item.key for item in await find_participants(self.node, role)]

    def head(self, newest: int | None = None, **changes: Any) -> Head:
        """Return the head of the chain, with some fields changed."""
        expires_ms = int(self.clock.now() * 1000) + HOUR_MS
        return self.chain.head(newest, **({"expires_ms": expires_ms} | changes))

    async def put_head(self, head: Head, *keys: SigningKey, at: SigningKey = TRAINER) -> None:
        """Put a head, signed by the trainer or by other keys, into the space of a key."""
        await self.store.put(paths.head(at.public), sign(head, *(keys or (TRAINER,))))

    def manifest_path(self, version: int) -> str:
        return paths.manifest(TRAINER.public, version, self.chain.signed_manifests[version].digest)

    def patch_path(self, version: int) -> str:
        """Return the path of the first part of a version's patch."""
        ref = self.chain.signed_manifests[version].record.patch
        assert ref is not None
        return paths.patch(TRAINER.public, ref.parts[0].digest)

    def shard_path(self, version: int) -> str:
        """Return the path of the first shard of a version's anchor."""
        return paths.anchor(TRAINER.public, self.chain.signed_manifests[version].record.anchor[0].digest)

    async def replace(self, path: str, data: bytes | None) -> None:
        """Put other bytes at a path, or delete the object."""
        await (self.store.delete(path) if data is None else self.store.put(path, data))

    async def forge(self, **changes: Any) -> Signed[Manifest]:
        """Publish a next manifest with changes, signed by the trainer and listed in its head, as a bad trainer does."""
        last = self.chain.signed_manifests[-1]
        fields = dict(last.record) | {"version": last.record.version + 1, "previous": last.digest}
        signed = open_announced(sign(Manifest(**(fields | changes)), TRAINER), Manifest)
        await self.store.put(paths.manifest(TRAINER.public, fields["version"], signed.digest), signed.data)
        self.chain.signed_manifests.append(signed)
        await self.put_head(self.head())
        return signed

    async def mirror(self, key: SigningKey, **changes: Any) -> None:
        """Publish the chain in another trainer's space, signed by that trainer's key."""
        async for item in self.store.list(TRAINER.public.hex() + "/"):
            rest = item.path.removeprefix(TRAINER.public.hex())
            if not rest.startswith(("/head", "/manifests")):
                await self.store.put(key.public.hex() + rest, await self.store.get(item.path, 1 << 30))
        for version, signed in enumerate(self.chain.signed_manifests):
            await self.store.put(paths.manifest(key.public, version, signed.digest), sign(signed.record, key))
        await self.put_head(self.head(**changes), key, at=key)

    def point(self, version: int) -> ChainPoint:
        return ChainPoint(version=version, digest=self.chain.signed_manifests[version].digest)

    async def rewind(self, version: int, successor: SigningKey) -> None:
        """Revoke the trainer, rewind the chain to a version, and publish it under another key."""
        await self.revise(trainers=(successor.public,), revoked=(TRAINER.public,), rewind=self.point(version))
        await self.mirror(successor, epoch=1, revision=1)

    def next_revision(self, **changes: Any) -> Revision:
        """Return the revision after those that the node knows.

        Args:
            changes: fields of the authority, or of the revision itself.
        """
        revisions = self.node.revisions
        record_fields = {
            name: changes.pop(name) for name in ("rewind", "number", "previous", "run", "note") if name in changes
        }
        authority = Authority(**(dict(revisions.current) | changes))
        fields: dict[str, Any] = {
            "number": revisions.number + 1,
            "previous": revisions.digest,
            "run": self.run_id,
            "authority": authority,
        }
        return revision(**(fields | record_fields))

    async def revise(self, *keys: SigningKey, at: str = "", **changes: Any) -> Revision:
        """Put the next revision at the meeting point or at a path, signed by two roots or by other keys."""
        record = self.next_revision(**changes)
        data = sign(record, *(keys or ROOTS[:2]))
        await self.store.put(at or paths.revision(self.run_id, self.node.revisions.number + 1), data)
        return record

    async def revise_and_learn(self, *keys: SigningKey, at: str = "", **changes: Any) -> Revision:
        """Put the next revision, as `revise` does, and let the node read it."""
        record = await self.revise(*keys, at=at, **changes)
        await refresh_authority(self.node)
        return record

    async def assert_refuses(self, match: str) -> None:
        """Let the node poll, and assert that it logs one error and still has its good version, in its state too."""
        good_state = await self._good_state()
        earlier_count = len(self.log.named("cannot-follow"))
        with trio.move_on_after(3.5):
            await keep_fresh(self.node, self.follower, 1.0)
        lines = [event["error"] for event in self.log.named("cannot-follow")[earlier_count:]]
        assert len(lines) == 1, lines
        assert re.search(match, lines[0]) and lines[0].isprintable() and len(lines[0]) < 500, lines[0]
        assert await self._good_state() == good_state

    async def assert_refuses_weights(self, match: str) -> None:
        """Assert that the node accepts the head, refuses its weights with one error, and still has good weights."""
        with suppress(ProtocolError, StoreError):
            await self.follower.refresh()
            await self.follower.prefetch()
        weights = self.follower.newest
        assert self.follower.chain.head is not None
        with pytest.raises((ProtocolError, StoreError), match=match) as refusal:
            await self.follower.rebuild(self.follower.chain.head.version)
        assert str(refusal.value).isprintable() and len(str(refusal.value)) < 500
        newest = self.follower.newest
        if newest is not weights:  # it may have verified versions between the two
            assert newest is not None and newest.version < self.follower.chain.head.version
            assert equal(newest.weights, self.chain.weights[newest.version])

    async def _good_state(self) -> tuple[int, bytes, bytes]:
        weights = self.follower.newest
        trust = b""
        with suppress(NotFoundError):
            trust = await self.state.get(TRUST_PATH, 1 << 20)
        return (weights.version, weights.digest, trust) if weights is not None else (-1, b"", trust)

    async def assert_follows(self) -> None:
        """Assert that the node follows to the newest honest version, bit for bit."""
        assert equal(await self.follow(), self.chain.weights[-1])

    async def assert_refuses_revision(self, match: str, event: str = "revision-refused") -> None:
        """Let the node read revisions, and assert that it logs one error and does not change its authority."""
        number, earlier_count = self.node.revisions.number, len(self.log.named(event))
        await refresh_authority(self.node)
        lines = {event["error"] for event in self.log.named(event)[earlier_count:]}
        assert len(lines) == 1, lines
        assert re.search(match, next(iter(lines))), lines
        assert self.node.revisions.number == number


async def follow_chain(versions: int = 3, store: MemoryStore | None = None, **authority: Any) -> AttackedFollower:
    """Return a testbed whose node has the weights of the newest of some versions."""
    testbed = AttackedFollower(store, **authority)
    await testbed.publish(versions + 1)
    await testbed.restart()
    await testbed.follow()
    return testbed
