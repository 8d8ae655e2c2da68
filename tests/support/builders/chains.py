"""A small chain in memory, which the publisher's own functions make, and nodes that follow it."""

from typing import Any

import torch
import trio

from protocol import paths
from protocol.chain import safetensors
from protocol.chain.manifest import Head, Manifest, PatchRef, tensor_table
from protocol.digest import Weights, digest_weights
from protocol.encoding import content_digest
from protocol.identity.signing import Signed, SigningKey, open_signed, sign
from protocol.patch import encode, split_parts, summary
from protocol.run import RunManifest
from roles.node.identity import Node
from roles.ports import Clock, ObjectStore
from roles.trainer.publish.host_files import reference
from roles.trainer.tensor_shards import TensorSource
from tests.support.builders.recipes import demo_rules
from tests.support.simulation.network import BEGIN, Log, draft, inline
from tests.support.simulation.virtual_clock import TrioClock

TRAINER = SigningKey(b"t" * 32)
MINER = SigningKey(b"m" * 32)


def small_weights(seed: int) -> dict[str, torch.Tensor]:
    """Return two BF16 tensors: `a` [12, 7] and `b` [5]."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(12, 7, generator=generator).bfloat16(),
        "b": torch.randn(5, generator=generator).bfloat16(),
    }


def change_elements(weights: Weights, seed: int) -> dict[str, torch.Tensor]:
    """Return the weights with other values in up to three elements of one tensor."""
    generator = torch.Generator().manual_seed(seed)
    name = "a" if seed % 2 else "b"
    tensor = weights[name].clone()
    places = torch.randint(tensor.numel(), (3,), generator=generator)
    tensor.view(-1)[places] = torch.randn(3, generator=generator).bfloat16()
    return {**weights, name: tensor}


class Chain:
    """Publishes versions into a store, as a trainer does.

    Attributes:
        signed_manifests, weights: by version.
        anchors: the versions with an anchor.
        part_bytes: of a patch's parts.
    """

    def __init__(self, run_id: bytes, store: ObjectStore, expires_ms: int) -> None:
        self._run_id = run_id
        self._store = store
        self._expires_ms = expires_ms
        self.signed_manifests: list[Signed[Manifest]] = []
        self.weights: list[Weights] = []
        self.anchors: list[int] = []
        self.part_bytes = 1 << 20

    async def publish(self, weights: Weights, *, anchor: bool = False, head: bool = True) -> Manifest:
        """Publish the next version; the first one always has an anchor."""
        version = len(self.signed_manifests)
        patch = encode(self.weights[-1], weights) if version else None
        source = TensorSource.of(weights)
        anchor_files = safetensors.shards(source.sizes, 1 << 20) if anchor or patch is None else []
        shards = [source.file(names) for names in anchor_files]
        parts = split_parts(patch, self.part_bytes) if patch else ()
        manifest = Manifest(
            run=self._run_id,
            version=version,
            previous=self.signed_manifests[-1].digest if version else b"",
            weights=digest_weights(weights),
            tensors=tensor_table(weights),
            patch=PatchRef(parts=tuple(map(reference, parts)), changed=summary(patch).changed) if patch else None,
            anchor=tuple(map(reference, shards)),
            optimizer_step=version,
            beacon_round=1,
            first_window=version,
            epoch=0,
        )
        for part in parts:
            await self._store.put(paths.patch(TRAINER.public, content_digest(part)), part)
        for ref, shard in zip(manifest.anchor, shards, strict=True):
            await self._store.put(paths.anchor(TRAINER.public, ref.digest), shard)
        signed = open_signed(sign(manifest, TRAINER), Manifest, [TRAINER.public])
        await self._store.put(paths.manifest(TRAINER.public, version, signed.digest), signed.data)
        self.signed_manifests.append(signed)
        self.weights.append(weights)
        self.anchors += [version] if manifest.anchor else []
        if head:
            await self.write_head()
        return manifest

    def head(self, newest: int | None = None, **changes: Any) -> Head:
        """Return a head that lists the versions up to `newest`, with some fields changed."""
        newest = len(self.signed_manifests) - 1 if newest is None else newest
        fields: dict[str, Any] = {
            "run": self._run_id,
            "epoch": 0,
            "base": 0,
            "manifests": tuple(signed.digest for signed in self.signed_manifests[: newest + 1]),
            "anchors": tuple(version for version in self.anchors if version <= newest),
            "oldest_patch": 1,
            "revision": 0,
            "expires_ms": self._expires_ms,
        }
        return Head(**(fields | changes))

    async def write_head(self) -> None:
        """Put a head that lists all versions."""
        await self._store.put(paths.head(TRAINER.public), sign(self.head(), TRAINER))


def make_node(
    run_id: bytes,
    run: RunManifest,
    store: Any,
    state: ObjectStore,
    log: Log,
    key: SigningKey = MINER,
    *,
    clock: Clock | None = None,
) -> Node:
    """Return a node, by default with a miner's key and trio's clock."""
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
    """A beacon whose rounds are always published."""

    async def randomness(self, round_number: int) -> bytes:
        await trio.lowlevel.checkpoint()
        return round_number.to_bytes(32, "little")


def small_run(genesis: bytes) -> tuple[bytes, RunManifest]:
    """Return the id and the manifest of a run with this genesis, whose only trainer is TRAINER."""
    run = draft(demo_rules(), ("validator",))
    authority = run.authority.model_copy(update={"trainers": (TRAINER.public,)})
    run = run.model_copy(update={"authority": authority, "model": run.model.model_copy(update={"genesis": genesis})})
    return content_digest(run.to_bytes()), run


def equal(first: Weights, second: Weights) -> bool:
    """Return whether two sets of weights are equal bit for bit."""
    return first.keys() == second.keys() and all(
        torch.equal(first[name].view(torch.int16), second[name].view(torch.int16)) for name in first
    )
