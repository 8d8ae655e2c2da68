"""A small published chain in memory, made by the publisher's own functions."""

from typing import Any

import torch
import trio

from grailnode.run.creation import Choices
from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.chain.manifest import Head, Manifest
from protocol.digest import Weights, content_digest
from protocol.identity.signing import Signed, SigningKey, open_signed, sign
from protocol.patch import LinkConditions
from protocol.run import RunManifest
from roles.node.identity import Node
from roles.ports import Clock
from roles.trainer.publish.version_build import (
    PublicationMoment,
    VersionObjects,
    check_patch,
    digest_snapshot,
    encode_patch,
    make_manifest,
    make_shards,
)
from tests.support.simulation.network import BEGIN, Log, draft, inline
from tests.support.simulation.trio_clock import TrioClock

TRAINER = SigningKey(b"t" * 32)
MINER = SigningKey(b"m" * 32)


def small_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(12, 7, generator=generator).bfloat16(),
        "b": torch.randn(5, generator=generator).bfloat16(),
    }


def changed(weights: Weights, seed: int) -> dict[str, torch.Tensor]:
    """The weights with a few elements of one tensor changed."""
    generator = torch.Generator().manual_seed(seed)
    name = "a" if seed % 2 else "b"
    tensor = weights[name].clone()
    places = torch.randint(tensor.numel(), (3,), generator=generator)
    tensor.view(-1)[places] = torch.randn(3, generator=generator).bfloat16()
    return {**weights, name: tensor}


class Chain:
    """Publishes versions into a store, as a trainer does."""

    def __init__(self, run_id: bytes, store: MemoryStore, expires_ms: int) -> None:
        self._run_id = run_id
        self._store = store
        self._expires_ms = expires_ms
        self.signed: list[Signed[Manifest]] = []
        self.weights: list[Weights] = []
        self.anchors: list[int] = []

    async def publish(self, weights: Weights, *, anchor: bool = False, head: bool = True) -> Manifest:
        """The next version; the first always has an anchor."""
        version = len(self.signed)
        before = digest_snapshot(version - 1, self.weights[-1], None) if version else None
        verified = digest_snapshot(version, weights, before)
        patch = encode_patch(verified, before, "compact", LinkConditions()).patch if before else None
        count = check_patch(patch, verified, before) if patch and before else 0
        shards = make_shards(weights, 1 << 20) if anchor or before is None else ()
        moment = PublicationMoment(self._run_id, self.signed[-1].digest if version else b"", version, 1, version, 0)
        manifest = make_manifest(VersionObjects(verified, patch, count, shards), moment)
        if patch is not None:
            await self._store.put(paths.patch(TRAINER.public, content_digest(patch)), patch)
        for ref, shard in zip(manifest.anchor, shards, strict=True):
            await self._store.put(paths.anchor(TRAINER.public, ref.digest), shard)
        signed = open_signed(sign(manifest, TRAINER), Manifest, [TRAINER.public])
        await self._store.put(paths.manifest(TRAINER.public, version, signed.digest), signed.data)
        self.signed.append(signed)
        self.weights.append(weights)
        self.anchors += [version] if manifest.anchor else []
        if head:
            await self.write_head()
        return manifest

    async def write_head(self, *, newest: int | None = None, epoch: int = 0) -> bytes:
        """Show everything up to a version."""
        newest = len(self.signed) - 1 if newest is None else newest
        head = Head(
            run=self._run_id,
            epoch=epoch,
            base=0,
            manifests=tuple(signed.digest for signed in self.signed[: newest + 1]),
            anchors=tuple(version for version in self.anchors if version <= newest),
            oldest_patch=1,
            revision=0,
            expires_ms=self._expires_ms,
        )
        data = sign(head, TRAINER)
        await self._store.put(paths.head(TRAINER.public), data)
        return data


def make_node(
    run_id: bytes,
    run: RunManifest,
    store: Any,
    state: MemoryStore,
    log: Log,
    key: SigningKey = MINER,
    *,
    clock: Clock | None = None,
) -> Node:
    """A node, a miner's unless another key is given, whose clock is trio's unless another is given."""
    return Node(
        run_id=run_id,
        run=run,
        key=key,
        name=log.name,
        store=store,
        state=state,
        clock=clock or TrioClock(BEGIN),
        beacon=PunctualBeacon(),
        telemetry=log,
        run_sync=inline,
    )


class PunctualBeacon:
    """Every round that is asked for is out."""

    async def randomness(self, round_number: int) -> bytes:
        await trio.lowlevel.checkpoint()
        return round_number.to_bytes(32, "little")


def small_run(genesis: bytes) -> tuple[bytes, RunManifest]:
    """A run whose only trainer is TRAINER and whose genesis is given."""
    run = draft(Choices(), ["validator"])
    authority = run.authority.model_copy(update={"trainers": (TRAINER.public,)})
    run = run.model_copy(update={"authority": authority, "model": run.model.model_copy(update={"genesis": genesis})})
    return content_digest(run.to_bytes()), run
