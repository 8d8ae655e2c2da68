"""The follower that miners and validators share: from the store to a verified chain to verified weights
(docs/spec/chain.md).

It has the verified weights of one version, and of the few before it. A step to another version is transactional: new
tensors are built beside the old ones, digested and compared with the manifest, and only then become a version. Whatever
goes wrong, the node still has its last good version, and the caller gets the error.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
import trio

from protocol import paths
from protocol.chain import safetensors
from protocol.chain.manifest import Head, Manifest, ObjectRef, check_expiry
from protocol.chain.verifier import ChainVerifier, Plan, Trust
from protocol.digest import Weights, content_digest, tensor_digest, weights_digest
from protocol.errors import ChainError, ForkError, GapError, MalformedError, ProtocolError, error_context
from protocol.identity.signing import claimed_signers
from protocol.patch import apply_with_digests
from roles.gather import fetch_ahead, first_success, gather
from roles.node.identity import Node
from roles.policy.progress import CatchUpProgress
from roles.ports import NotFoundError, StoreError
from roles.records import fetch_envelope

TRUST_PATH = "trust"
_HEAD_SECONDS = 5.0  # to fetch the head, or half a window where that is longer
_OTHER_HEADS_SECONDS = 2.0  # to wait for other trainers' heads after the first valid one
_FETCH_AHEAD = 8  # objects
_MAX_STEPS = 8  # patches that are kept with the weights that they led to,
_STEP_SHARE = 4  # together at most the weights' bytes divided by this


@dataclass(frozen=True)
class PatchStep:
    """A patch that was applied.

    Attributes:
        base: digest of the weights before it; manifest: of the version after it.
    """

    base: bytes
    manifest: Manifest
    patch: bytes


@dataclass(frozen=True)
class VerifiedWeights:
    """The weights of one version, whose digest is the one in its manifest.

    Attributes:
        digests: BLAKE3 of each tensor; digest: of all weights.
        steps: the last patches that led here, in order, for an engine that serves a version before one of them.
    """

    version: int
    weights: Weights
    digests: dict[str, bytes]
    digest: bytes
    steps: tuple[PatchStep, ...] = ()

    def steps_from(self, digest: bytes | None) -> tuple[PatchStep, ...]:
        """Return the patches that lead here from weights with a digest; none if they are not known."""
        places = [place for place, step in enumerate(self.steps) if step.base == digest]
        return self.steps[places[-1] :] if places else ()


@dataclass(frozen=True)
class _Step:
    """One step of a plan: to load a version's anchor, or to apply its patch."""

    manifest: Manifest
    from_anchor: bool

    @property
    def size(self) -> int:
        """Bytes to fetch."""
        if self.from_anchor:
            return sum(ref.size for ref in self.manifest.anchor)
        assert self.manifest.patch is not None
        return self.manifest.patch.object.size


def verify_weights(manifest: Manifest, weights: Weights, digests: dict[str, bytes]) -> VerifiedWeights:
    """Compare weights with their manifest.

    Args:
        digests: BLAKE3 of each tensor.

    Raises:
        ChainError: they are not the weights that the manifest names.
    """
    digest = weights_digest(digests, weights)
    if digest != manifest.weights:
        raise ChainError("the rebuilt weights are not those that the trainer signed", f"version {manifest.version}")
    return VerifiedWeights(manifest.version, weights, digests, digest)


def apply_patch(base: VerifiedWeights, manifest: Manifest, patch: bytes) -> VerifiedWeights:
    """Return the version after `base`, verified. Both share the tensors that did not change, and their digests.

    Raises:
        ProtocolError: the patch does not fit, or does not lead to the signed weights; `base` is untouched.
    """
    result = apply_with_digests(base.weights, patch, digests=base.digests)
    weights = verify_weights(manifest, result.weights, result.digests)
    steps = (*base.steps[1 - _MAX_STEPS :], PatchStep(base.digest, manifest, patch))
    most = sum(tensor.nbytes for tensor in weights.weights.values()) // _STEP_SHARE
    while steps and sum(len(step.patch) for step in steps) > most:
        steps = steps[1:]
    return replace(weights, steps=steps)


def load_anchor(manifest: Manifest, files: list[bytes]) -> VerifiedWeights:
    """Return a version from the shards of its anchor, verified.

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
    return verify_weights(manifest, tensors, {name: tensor_digest(tensor) for name, tensor in tensors.items()})


class Follower:
    """Follows the chain of a run.

    Args:
        node: whose store and state to use.
        chain: the chain that is trusted so far.
        keep: how many versions of weights to keep in memory, the newest included.
        allow_expired: whether to follow a head that has expired: for looking at a run that has ended, never for acting
            on it.
    """

    def __init__(self, node: Node, chain: ChainVerifier, keep: int, *, allow_expired: bool = False) -> None:
        self._node = node
        self._chain = chain
        self._keep = keep
        self._allow_expired = allow_expired
        self._trainer = node.authority.trainers[0]
        self._weights: dict[int, VerifiedWeights] = {}  # by version
        # By version and digest: after a rewind a version has another patch.
        self._patches: dict[tuple[int, bytes], bytes] = {}
        self._refresh_lock = trio.Lock()
        self._rebuild_lock = trio.Lock()
        self._rebuild_scope = trio.CancelScope()

    @classmethod
    async def open(cls, node: Node, keep: int = 1, *, allow_expired: bool = False) -> "Follower":
        """Return a follower that begins with the trust in this node's state.

        Raises:
            ProtocolError: the stored trust is damaged; StoreError: it cannot be read. Neither is safe to ignore.
        """
        try:
            data = await node.state.get(TRUST_PATH, Trust.max_bytes)
            with error_context(f"{TRUST_PATH} of this node's state"):
                trust = Trust.from_bytes(data)
        except NotFoundError:
            trust = None
        verifier = ChainVerifier(node.run_id, node.run, trust, node.revisions)
        return cls(node, verifier, keep, allow_expired=allow_expired)

    @property
    def chain(self) -> ChainVerifier:
        """The trusted chain."""
        return self._chain

    @property
    def newest(self) -> VerifiedWeights | None:
        """The weights of the newest version in memory; None before the first."""
        return self._weights[max(self._weights)] if self._weights else None

    def version_for(self, window: int) -> int:
        """Return the newest version that serves a window.

        Raises:
            GapError: no version of the chain serves it yet, or not every manifest has been fetched.
            ExpiredError: the head has expired since it was followed: storage may be hiding a newer one.
        """
        if self._chain.head is not None and not self._allow_expired:
            check_expiry(self._chain.head, self._node.clock.now())
        return self._chain.version_for(window)

    async def refresh(self) -> None:
        """Look for a newer head, verify the manifests that it lists, and store the new trust on disk.

        Raises:
            StoreError: the store did not answer. Chain and weights stay as they were.
            ProtocolError: the store shows a chain that must not be followed. Chain and weights stay as they were.
        """
        async with self._refresh_lock:
            await self._apply_rewind()
            chain, trainer = await first_success(self._follow_chain, await self._valid_chains())
            if chain.trust is not None and chain.trust != self._chain.trust:
                await self._node.state.put(TRUST_PATH, chain.trust.to_bytes())
            self._chain, self._trainer = chain, trainer
            self._drop_other_weights()

    async def _apply_rewind(self) -> None:
        """Forget what a stolen key published: on disk first, then in memory."""
        chain = self._chain.branch()
        chain.apply_rewind()
        if chain.trust is None or chain.trust == self._chain.trust:
            return
        trust = chain.trust
        self._node.telemetry.event("chain-rewound", version=trust.version, revision=trust.revision)
        await self._node.state.put(TRUST_PATH, trust.to_bytes())
        self._chain = chain
        self._patches = {}
        self._rebuild_scope.cancel()
        self._drop_other_weights()

    def _drop_other_weights(self) -> None:
        """Drop weights that are not those of the chain as it is now."""
        digests = {manifest.version: manifest.weights for manifest in self._chain.manifests()}
        newest = self._chain.trust.version if self._chain.trust is not None else -1
        self._weights = {
            version: weights
            for version, weights in self._weights.items()
            if version <= newest and digests.get(version, weights.digest) == weights.digest
        }

    async def _accept_manifest(self, chain: ChainVerifier, version: int, data: bytes) -> None:
        try:
            await self._node.run_sync(chain.accept_manifest, version, data)  # seconds, of a model of very many tensors
        except ForkError as error:
            self._report_fork(claimed_signers(data, Manifest), error)
            raise

    def _accept_head(self, chain: ChainVerifier, data: bytes) -> None:
        try:
            chain.accept_head(data, self._node.clock.now(), allow_expired=self._allow_expired)
        except ForkError as error:
            self._report_fork(claimed_signers(data, Head), error)
            raise

    def _report_fork(self, signers: tuple[bytes, ...], error: ForkError) -> None:
        """Raise an alarm that names the signers, whoever's space it was in; their signatures were checked before."""
        names = ", ".join(signer.hex()[:16] for signer in signers)
        self._node.alarm(f"trainer {names} signed two histories: {error}")

    async def _valid_chains(self) -> list[tuple[ChainVerifier, bytes]]:
        """Return the chain of each trainer with a valid head, and that trainer; manifests come later.

        The newest head comes first; of equally new ones, that of the trainer that the authority prefers. Heads that do
        not come soon after the first valid one are left out.

        Raises:
            StoreError, ProtocolError: the failure of the first trainer, if no trainer's head is valid.
        """
        trainers = self._node.authority.trainers
        chains: list[tuple[ChainVerifier, bytes]] = []
        failures: dict[bytes, Exception] = {}

        async def read_head(trainer: bytes, scope: trio.CancelScope) -> None:
            chain = self._chain.branch()
            try:
                self._accept_head(chain, await self._fetch_head(trainer))
            except (StoreError, ProtocolError) as error:
                failures[trainer] = error
                return
            chains.append((chain, trainer))
            scope.deadline = min(scope.deadline, trio.current_time() + _OTHER_HEADS_SECONDS)

        async with trio.open_nursery() as nursery:
            for trainer in trainers:
                nursery.start_soon(read_head, trainer, nursery.cancel_scope)
        if not chains:
            raise next(failures[trainer] for trainer in trainers if trainer in failures)
        return sorted(chains, key=lambda item: (_age(item[0]), trainers.index(item[1])))

    async def _follow_chain(self, item: tuple[ChainVerifier, bytes]) -> tuple[ChainVerifier, bytes]:
        """Fetch the manifests of a chain, and return it.

        Raises:
            StoreError, ProtocolError: one of them cannot be fetched, or must not be followed.
        """
        await self._fetch_manifests(*item)
        return item

    async def _fetch_head(self, trainer: bytes) -> bytes:
        """Fetch a trainer's head, unchecked. A fetch that hangs is given up soon, so that the next one can start.

        Raises:
            StoreError: it cannot be read.
        """
        path, schedule = paths.head(trainer), self._node.run.schedule
        seconds = max(_HEAD_SECONDS, 0.5 * schedule.rounds * self._node.run.beacon.period_ms / 1000)
        with trio.move_on_after(seconds):
            return await fetch_envelope(self._node, Head, path)
        raise StoreError(f"{path}: no answer within {seconds:g} s")

    async def _fetch_manifests(self, chain: ChainVerifier, trainer: bytes) -> None:
        """Fetch and check the manifests that the head lists, in order, only a few of them in memory unchecked."""

        async def fetch(entry: tuple[int, bytes]) -> bytes:
            return await fetch_envelope(self._node, Manifest, paths.manifest(trainer, *entry))

        async def accept(entry: tuple[int, bytes], data: bytes) -> None:
            await self._accept_manifest(chain, entry[0], data)

        await fetch_ahead(fetch, chain.missing_manifests(), accept, ahead=_FETCH_AHEAD)

    async def _fetch_object(self, path: str, ref: ObjectRef) -> bytes:
        data = await self._node.store.get(path, ref.size)
        if content_digest(data) != ref.digest:
            raise ChainError("not the bytes that the manifest names", path)
        return data

    async def _fetch_patch(self, manifest: Manifest) -> tuple[int, bytes]:
        """Fetch a patch unless it is in memory, and return its key there."""
        assert manifest.patch is not None
        ref = manifest.patch.object
        key = manifest.version, ref.digest
        if key not in self._patches:
            self._patches[key] = await self._fetch_object(paths.patch(self._trainer, ref.digest), ref)
        return key

    async def _fetch_shard(self, progress: CatchUpProgress, ref: ObjectRef) -> bytes:
        data = await self._fetch_object(paths.anchor(self._trainer, ref.digest), ref)
        progress.add_fetched(len(data))
        return data

    async def prefetch(self) -> None:
        """Fetch the patches from the newest weights to the head, so that no window's opening waits for them.

        Raises:
            StoreError, ProtocolError: one of them cannot be fetched, or is not the patch that its manifest names.
        """
        newest, head = self.newest, self._chain.head
        if newest is None or head is None or newest.version >= head.version:
            return
        try:
            plan = self._chain.plan(newest.version, head.version)
        except GapError:
            return  # the next `rebuild` raises it
        if plan.anchor is None:
            await gather(self._fetch_patch, plan.patches[:_FETCH_AHEAD])
            self._drop_old_patches()

    async def rebuild(self, version: int) -> VerifiedWeights:
        """Return the verified weights of a version, rebuilt unless they are in memory; the newest few stay there.

        Raises:
            StoreError, ProtocolError: they cannot be rebuilt now. The weights in memory stay.
        """
        async with self._rebuild_lock:
            weights: VerifiedWeights | None = None
            with trio.CancelScope() as self._rebuild_scope:
                weights = await self._rebuild(version)
            if weights is None or self._rebuild_scope.cancel_called:
                self._drop_other_weights()
                raise ChainError("the chain was rewound meanwhile", f"version {version}")
            return weights

    async def _rebuild(self, version: int) -> VerifiedWeights:
        if version in self._weights:
            return self._weights[version]
        base = max((older for older in self._weights if older < version), default=None)
        plan = self._chain.plan(base, version)
        try:
            weights = await self._carry_out(plan, base)
        except (StoreError, ProtocolError) as error:
            slow = None if plan.anchor is not None else self._chain.slow_plan(version)
            newest_older = max((older for older in self._weights if older < version), default=-1)
            if slow is None or slow.anchor is None or slow.anchor.version <= newest_older:
                raise  # the slow path would need the very patch that failed
            self._node.telemetry.event("fast-path-failed", version=version, error=str(error))
            weights = await self._carry_out(slow, None)
        self._remember(weights)
        return weights

    def _remember(self, weights: VerifiedWeights) -> None:
        self._weights[weights.version] = weights
        while len(self._weights) > self._keep:
            del self._weights[min(self._weights)]
        self._drop_old_patches()

    def _drop_old_patches(self) -> None:
        """Drop the patches up to the newest version whose weights are in memory."""
        newest = max(self._weights, default=-1)
        self._patches = {key: data for key, data in self._patches.items() if key[0] > newest}

    async def _carry_out(self, plan: Plan, base: int | None) -> VerifiedWeights:
        """Carry out a plan, fetching the next objects while one step is applied.

        After a failure, the last version that was verified before it stays in memory.
        """
        steps = [*([_Step(plan.anchor, True)] if plan.anchor else []), *(_Step(patch, False) for patch in plan.patches)]
        weights = self._weights[base] if plan.anchor is None and base is not None else None
        target = steps[-1].manifest.version
        progress = CatchUpProgress(self._node.clock, self._node.telemetry, target, [step.size for step in steps])

        async def fetch(step: _Step) -> list[bytes]:
            if step.from_anchor:
                return await gather(partial(self._fetch_shard, progress), step.manifest.anchor)
            key = await self._fetch_patch(step.manifest)
            data = self._patches.pop(key)  # without waiting: a rewind may replace the patches at any checkpoint
            progress.add_fetched(len(data))
            return [data]

        async def apply(step: _Step, files: list[bytes]) -> None:
            nonlocal weights
            if step.from_anchor:
                weights = await self._node.run_sync(load_anchor, step.manifest, files)
            else:
                weights = await self._node.run_sync(apply_patch, weights, step.manifest, files[0])
            progress.finish_step()

        try:
            await fetch_ahead(fetch, steps, apply, ahead=_FETCH_AHEAD)
        except (StoreError, ProtocolError):
            if weights is not None and weights.version not in self._weights:
                self._remember(weights)
            raise
        assert weights is not None
        return weights


def _age(chain: ChainVerifier) -> tuple[int, int]:
    """Return a rank of a chain by its head: the lower, the newer."""
    head = chain.head
    return (-head.epoch, -head.version) if head is not None else (0, 0)
