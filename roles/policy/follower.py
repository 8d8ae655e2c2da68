"""store -> chain -> weights: the follower that miners and validators share (docs/spec/chain.md).

It holds one version of the weights that verified, and the few before it. A step to another version is transactional:
new tensors are built beside the held ones, digested, compared with the manifest, and only then held. Whatever goes
wrong, the node keeps its last good version and the caller learns why.
"""

from dataclasses import dataclass
from functools import partial

import torch
import trio

from protocol import paths
from protocol.chain import safetensors
from protocol.chain.manifest import Head, Manifest, ObjectRef, check_expiry
from protocol.chain.verifier import ChainVerifier, Plan, Trust
from protocol.digest import Weights, content_digest, tensor_digest, weights_digest
from protocol.errors import ChainError, ForkError, GapError, MalformedError, ProtocolError
from protocol.identity.signing import claimed_signers
from protocol.limits import MAX_ENVELOPE_BYTES, MAX_HEAD_BYTES, MAX_RECORD_BYTES
from protocol.patch import apply_with_digests
from roles.gather import fetch_ahead, gather
from roles.node.identity import Node
from roles.policy.progress import CatchUpProgress
from roles.ports import NotFoundError, StoreError

TRUST_PATH = "trust"
_HEAD_SECONDS = 5.0  # for a look at the head, or half a window where that is longer
_PREFETCHED = 8  # patches


@dataclass(frozen=True)
class VerifiedWeights:
    """Verified weights of one version.

    Attributes:
        digests: BLAKE3 of each tensor; digest: of the weights, equal to the manifest's.
    """

    version: int
    weights: Weights
    digests: dict[str, bytes]
    digest: bytes


@dataclass(frozen=True)
class _Step:
    """One step of a plan: to load a version's anchor, whole, or to apply its patch."""

    manifest: Manifest
    whole: bool

    @property
    def size(self) -> int:
        """Bytes to fetch."""
        if self.whole:
            return sum(ref.size for ref in self.manifest.anchor)
        assert self.manifest.patch is not None
        return self.manifest.patch.object.size


def verified(manifest: Manifest, weights: Weights, digests: dict[str, bytes]) -> VerifiedWeights:
    """Weights that are what their manifest says.

    Raises:
        ChainError: they are not.
    """
    digest = weights_digest(digests, weights)
    if digest != manifest.weights:
        raise ChainError("the rebuilt weights are not those that the trainer signed", f"version {manifest.version}")
    return VerifiedWeights(manifest.version, weights, digests, digest)


def step(held: VerifiedWeights, manifest: Manifest, patch: bytes) -> VerifiedWeights:
    """The version after `held`, verified. Tensors that did not change are shared, and so are their digests.

    Raises:
        ProtocolError: the patch does not fit, or does not lead to the signed weights; `held` is untouched.
    """
    applied = apply_with_digests(held.weights, patch, digests=held.digests)
    return verified(manifest, applied.weights, applied.digests)


def load_anchor(manifest: Manifest, files: list[bytes]) -> VerifiedWeights:
    """A version from the shards of its anchor, verified.

    Raises:
        ProtocolError: the shards are not safetensors, or not the signed weights.
    """
    tensors: dict[str, torch.Tensor] = {}
    for data in files:
        shard = safetensors.read(data)
        if not tensors.keys().isdisjoint(shard):
            raise MalformedError("a tensor in two shards of its anchor", f"version {manifest.version}")
        tensors |= shard
    manifest.check_table(tensors)
    return verified(manifest, tensors, {name: tensor_digest(tensor) for name, tensor in tensors.items()})


class Follower:
    """Follows the chain of a run.

    Args:
        node: whose store and state to use.
        chain: what is trusted so far.
        keep: how many versions of weights stay at hand, the newest included.
        even_expired: whether to follow a head that has expired: for looking at a run that has ended, never for acting
            on it.
    """

    def __init__(self, node: Node, chain: ChainVerifier, keep: int, *, even_expired: bool = False) -> None:
        self._node = node
        self._chain = chain
        self._keep = keep
        self._even_expired = even_expired
        self._trainer = node.authority.trainers[0]
        self._held: dict[int, VerifiedWeights] = {}
        # By version and digest: after a rewind a version has another patch.
        self._patches: dict[tuple[int, bytes], bytes] = {}
        self._refreshing = trio.Lock()
        self._holding = trio.Lock()
        self._following = trio.CancelScope()

    @classmethod
    async def open(cls, node: Node, keep: int = 1, *, even_expired: bool = False) -> "Follower":
        """A follower that remembers what this node trusted before.

        Raises:
            ProtocolError: the remembered trust is damaged; StoreError: it cannot be read. Neither is safe to ignore.
        """
        try:
            trust = Trust.from_bytes(await node.state.get(TRUST_PATH, Trust.max_bytes))
        except NotFoundError:
            trust = None
        verifier = ChainVerifier(node.run_id, node.run, trust, node.revisions)
        return cls(node, verifier, keep, even_expired=even_expired)

    @property
    def chain(self) -> ChainVerifier:
        """The trusted chain."""
        return self._chain

    @property
    def newest(self) -> VerifiedWeights | None:
        """The weights of the newest version held; None before the first."""
        return self._held[max(self._held)] if self._held else None

    def version_for(self, window: int) -> int:
        """The newest version that serves a window.

        Raises:
            GapError: no version that is kept serves it yet, or not every manifest is at hand.
            ExpiredError: the head has expired since it was followed: storage may be hiding a newer one.
        """
        if self._chain.head is not None and not self._even_expired:
            check_expiry(self._chain.head, self._node.clock.now())
        return self._chain.version_for(window)

    async def refresh(self) -> None:
        """Look for a newer head, verify what it lists, and remember it on disk.

        Raises:
            StoreError: the store did not answer; what is held stays good.
            ProtocolError: the store shows something that must not be followed; what is held stays good.
        """
        async with self._refreshing:
            await self._obey_rewind()
            chain, trainer = await self._newest_chain()
            await self._take_manifests(chain, trainer)
            if chain.trust is not None and chain.trust != self._chain.trust:
                await self._node.state.put(TRUST_PATH, chain.trust.to_bytes())
            self._chain, self._trainer = chain, trainer
            self._forget_disowned()

    async def _obey_rewind(self) -> None:
        """Forget what a stolen key published, on disk first."""
        chain = self._chain.branch()
        chain.obey_rewind()
        if chain.trust is None or chain.trust == self._chain.trust:
            return
        point = chain.trust
        self._node.telemetry.event("chain-rewound", version=point.version, revision=point.revision)
        await self._node.state.put(TRUST_PATH, point.to_bytes())
        self._chain = chain
        self._patches = {}
        self._following.cancel()
        self._forget_disowned()

    def _forget_disowned(self) -> None:
        """Forget weights that are not those of the chain as it is now."""
        now = {manifest.version: manifest.weights for manifest in self._chain.manifests()}
        trusted = self._chain.trust.version if self._chain.trust is not None else -1
        self._held = {
            v: held for v, held in self._held.items() if v <= trusted and now.get(v, held.digest) == held.digest
        }

    async def _accept_manifest(self, chain: ChainVerifier, version: int, data: bytes) -> None:
        try:
            await self._node.run_sync(chain.accept_manifest, version, data)  # seconds, of a model of very many tensors
        except ForkError as error:
            self._alarm_of_fork(claimed_signers(data, Manifest), error)
            raise

    def _accept_head(self, chain: ChainVerifier, data: bytes) -> None:
        try:
            chain.accept_head(data, self._node.clock.now(), even_expired=self._even_expired)
        except ForkError as error:
            self._alarm_of_fork(claimed_signers(data, Head), error)
            raise

    def _alarm_of_fork(self, signers: tuple[bytes, ...], error: ForkError) -> None:
        """Accuse who signed, in whatever space it lay; that the signatures hold is known before a fork is."""
        names = ", ".join(signer.hex()[:16] for signer in signers)
        self._node.alarm(f"trainer {names} signed two histories: {error}")

    async def _newest_chain(self) -> tuple[ChainVerifier, bytes]:
        """The chain after the first trainer's head that holds, its manifests not fetched yet; and that trainer.

        Raises:
            StoreError, ProtocolError: the first failure, where no trainer's head holds.
        """
        failures: list[Exception] = []
        for trainer in self._node.authority.trainers:
            chain = self._chain.branch()
            try:
                self._accept_head(chain, await self._read_head(trainer))
            except (StoreError, ProtocolError) as error:
                failures.append(error)
            else:
                return chain, trainer
        raise failures[0]

    async def _read_head(self, trainer: bytes) -> bytes:
        """A trainer's head, as storage shows it now. A look that hangs is given up soon: until the next one this node
        is behind.

        Raises:
            StoreError: it cannot be had.
        """
        path, schedule = paths.head(trainer), self._node.run.schedule
        seconds = max(_HEAD_SECONDS, 0.5 * schedule.rounds * self._node.run.beacon.period_ms / 1000)
        with trio.move_on_after(seconds):
            return await self._node.store.get(path, MAX_HEAD_BYTES + MAX_ENVELOPE_BYTES)
        raise StoreError(f"{path}: no answer within {seconds:g} s")

    async def _take_manifests(self, chain: ChainVerifier, trainer: bytes) -> None:
        """Fetch and check what the head lists, in order; of hostile ones no more than a few are ever held."""

        async def fetch(wanted: tuple[int, bytes]) -> bytes:
            return await self._node.store.get(paths.manifest(trainer, *wanted), MAX_RECORD_BYTES + MAX_ENVELOPE_BYTES)

        async def take(wanted: tuple[int, bytes], data: bytes) -> None:
            await self._accept_manifest(chain, wanted[0], data)

        await fetch_ahead(fetch, chain.missing(), take, ahead=_PREFETCHED)

    async def _fetch_object(self, path: str, ref: ObjectRef) -> bytes:
        data = await self._node.store.get(path, ref.size)
        if content_digest(data) != ref.digest:
            raise ChainError("not the bytes that the manifest names", path)
        return data

    async def _fetch_patch(self, manifest: Manifest) -> tuple[int, bytes]:
        """The key of a patch that is at hand now."""
        assert manifest.patch is not None
        ref = manifest.patch.object
        key = manifest.version, ref.digest
        if key not in self._patches:
            self._patches[key] = await self._fetch_object(paths.patch(self._trainer, ref.digest), ref)
        return key

    async def _fetch_shard(self, progress: CatchUpProgress, ref: ObjectRef) -> bytes:
        data = await self._fetch_object(paths.anchor(self._trainer, ref.digest), ref)
        progress.fetched(len(data))
        return data

    async def prefetch(self) -> None:
        """Fetch the patches between what is held and the head, so that a window's opening waits for none of them.

        Raises:
            StoreError, ProtocolError: one of them cannot be had.
        """
        newest, head = self.newest, self._chain.head
        if newest is None or head is None or newest.version >= head.version:
            return
        try:
            plan = self._chain.plan(newest.version, head.version)
        except GapError:
            return  # whoever holds a version next learns of it
        if plan.anchor is None:
            await gather(self._fetch_patch, plan.patches[:_PREFETCHED])
            self._forget_patches()

    async def hold(self, version: int) -> VerifiedWeights:
        """Rebuild a version, verified; it and the newest few stay at hand.

        Raises:
            StoreError, ProtocolError: it cannot be had now; what was held is still held.
        """
        async with self._holding:
            held: VerifiedWeights | None = None
            with trio.CancelScope() as self._following:
                held = await self._hold(version)
            if held is None or self._following.cancel_called:
                self._forget_disowned()
                raise ChainError("the chain was rewound meanwhile", f"version {version}")
            return held

    async def _hold(self, version: int) -> VerifiedWeights:
        if version in self._held:
            return self._held[version]
        base = max((held for held in self._held if held < version), default=None)
        plan = self._chain.plan(base, version)
        try:
            held = await self._follow(plan, base)
        except (StoreError, ProtocolError) as error:
            slow = None if plan.anchor is not None else self._chain.slow_plan(version)
            reached = max((held for held in self._held if held < version), default=-1)
            if slow is None or slow.anchor is None or slow.anchor.version <= reached:
                raise  # the slow path would need the very patch that failed
            self._node.telemetry.event("fast-path-failed", version=version, error=str(error))
            held = await self._follow(slow, None)
        self._remember(held)
        return held

    def _remember(self, held: VerifiedWeights) -> None:
        self._held[held.version] = held
        while len(self._held) > self._keep:
            del self._held[min(self._held)]
        self._forget_patches()

    def _forget_patches(self) -> None:
        """Those of versions that are held."""
        newest = max(self._held, default=-1)
        self._patches = {key: data for key, data in self._patches.items() if key[0] > newest}

    async def _follow(self, plan: Plan, base: int | None) -> VerifiedWeights:
        """Carry out a plan, fetching what comes next while one step is taken. What verified before a failure is kept."""
        steps = [*([_Step(plan.anchor, True)] if plan.anchor else []), *(_Step(patch, False) for patch in plan.patches)]
        held = self._held[base] if plan.anchor is None and base is not None else None
        target = steps[-1].manifest.version
        progress = CatchUpProgress(self._node.clock, self._node.telemetry, target, [step.size for step in steps])

        async def fetch(step: _Step) -> list[bytes]:
            if step.whole:
                return await gather(partial(self._fetch_shard, progress), step.manifest.anchor)
            key = await self._fetch_patch(step.manifest)
            data = self._patches.pop(key)  # of now: a rewind may have begun with none meanwhile
            progress.fetched(len(data))
            return [data]

        async def take(next_step: _Step, files: list[bytes]) -> None:
            nonlocal held
            if next_step.whole:
                held = await self._node.run_sync(load_anchor, next_step.manifest, files)
            else:
                held = await self._node.run_sync(step, held, next_step.manifest, files[0])
            progress.applied()

        try:
            await fetch_ahead(fetch, steps, take, ahead=_PREFETCHED)
        except (StoreError, ProtocolError):
            if held is not None and held.version not in self._held:
                self._remember(held)
            raise
        assert held is not None
        return held
