"""The follower that miners and validators share: from the store to a verified chain to verified weights
(docs/spec/chain.md).

It has the verified weights of one version, and of the few before it. A step to another version is transactional: new
tensors are built beside the old ones, digested and compared with the manifest, and only then become a version. Whatever
goes wrong, the node still has its last good version, and the caller gets the error. Each object of a step is decoded
when it has arrived and its digest was compared, while the next ones arrive.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import trio

from protocol import paths
from protocol.chain.manifest import Head, Manifest, check_expiry
from protocol.chain.verifier import ChainVerifier, Plan, Trust
from protocol.errors import ChainError, ForkError, GapError, ProtocolError, error_context
from protocol.identity.signing import claimed_signers
from protocol.patch import NewTensors
from roles.gather import answer_of, fetch_ahead, first_success, gather
from roles.node.identity import Node
from roles.policy.verified_weights import (
    AnchorBuild,
    PatchBuild,
    VerifiedWeights,
    VersionObject,
    WeightsBuild,
    objects_of,
)
from roles.ports import NotFoundError, StoreError
from roles.records import fetch_envelope, fetch_object

TRUST_PATH = "trust"
_HEAD_SECONDS = 5.0  # to fetch the head, or half a window where that is longer
_OTHER_HEADS_SECONDS = 2.0  # to wait for other trainers' heads after the first valid one
_FETCH_AHEAD = 8  # objects
_AHEAD_BYTES = 64 << 20  # of a version's objects, or one that is larger


class Follower:
    """Follows the chain of a run, once it is open, and keeps the weights of `keep` versions, where `new_tensors` says.
    An expired head is followed only for looking at a run that has ended, never for acting on it.
    """

    chain: ChainVerifier  # set by `open`

    def __init__(
        self,
        node: Node,
        keep: int = 1,
        *,
        allow_expired: bool = False,
        threads: int = 1,
        new_tensors: NewTensors | None = None,
    ) -> None:
        self._node = node
        self._keep = keep
        self._allow_expired = allow_expired
        self._threads = threads
        self._new_tensors = new_tensors
        self._trainer = node.authority.trainers[0]
        self._weights: dict[int, VerifiedWeights] = {}  # by version
        # Of patches, by version and digest: after a rewind a version has another patch.
        self._parts: dict[tuple[int, bytes], bytes] = {}
        self._refresh_lock = trio.Lock()
        self._rebuild_lock = trio.Lock()
        self._rebuild_scope = trio.CancelScope()

    async def open(self) -> "Follower":
        """Begin with the trust in this node's state; a ProtocolError or StoreError of it must not be ignored."""
        node, trust = self._node, None
        with suppress(NotFoundError), error_context(f"{TRUST_PATH} of this node's state"):
            trust = Trust.from_bytes(await node.state.get(TRUST_PATH, Trust.max_bytes))
        self.chain = ChainVerifier(node.run_id, node.run, trust, node.revisions)
        return self

    @property
    def newest(self) -> VerifiedWeights | None:
        """The weights of the newest version in memory; None before the first."""
        return self._weights[max(self._weights)] if self._weights else None

    def version_for(self, window: int) -> int:
        """Return the newest version that serves a window."""
        if self.chain.head is not None and not self._allow_expired:
            check_expiry(self.chain.head, self._node.clock.now())
        return self.chain.version_for(window)

    def shares(self, version: int) -> tuple[int, ...]:
        """Return the share of each stratum by which the groups of a version draw; empty in a run without tables."""
        if self._node.run.difficulty is None:
            return ()
        table = self.chain.manifest(version).difficulty
        return () if table is None else table.shares

    async def refresh(self) -> None:
        """Look for a newer head, verify the manifests that it lists, and store the new trust on disk. If the store does
        not answer (StoreError) or shows a chain that must not be followed (ProtocolError), chain and weights stay.
        """
        async with self._refresh_lock:
            await self._apply_rewind()
            chain, trainer = await first_success(self._follow_chain, await self._valid_chains())
            if chain.trust is not None and chain.trust != self.chain.trust:
                await self._node.state.put(TRUST_PATH, chain.trust.to_bytes())
            self.chain, self._trainer = chain, trainer
            self._drop_other_weights()

    async def _apply_rewind(self) -> None:
        """Forget what a stolen key published: on disk first, then in memory."""
        chain = self.chain.branch()
        chain.apply_rewind()
        if chain.trust is None or chain.trust == self.chain.trust:
            return
        self._node.telemetry.event("chain-rewound", version=chain.trust.version, revision=chain.trust.revision)
        await self._node.state.put(TRUST_PATH, chain.trust.to_bytes())
        self.chain, self._parts = chain, {}
        self._rebuild_scope.cancel()
        self._drop_other_weights()

    def _drop_other_weights(self) -> None:
        """Drop weights that are not those of the chain as it is now."""
        digests = {manifest.version: manifest.weights for manifest in self.chain.manifests()}
        newest = self.chain.trust.version if self.chain.trust is not None else -1
        self._weights = {
            version: weights
            for version, weights in self._weights.items()
            if version <= newest and digests.get(version, weights.digest) == weights.digest
        }

    @contextmanager
    def _fork_alarm(self, record_type: type[Head | Manifest], data: bytes) -> Iterator[None]:
        """Raise an alarm at a fork. It names the signers, which were checked, whoever's space the record was in."""
        try:
            yield
        except ForkError as error:
            names = ", ".join(signer.hex()[:16] for signer in claimed_signers(data, record_type))
            self._node.alarm(f"trainer {names} signed two histories: {error}")
            raise

    async def _valid_chains(self) -> list[tuple[ChainVerifier, bytes]]:
        """Return the chain of each trainer with a valid head, and that trainer; manifests come later. The newest head
        comes first; of equals, that of the trainer that the authority prefers. Heads that come long after the first are
        left out.
        """
        trainers = self._node.authority.trainers
        chains: dict[tuple[int, int, int], tuple[ChainVerifier, bytes]] = {}  # by rank, the best one lowest
        failures: dict[bytes, Exception] = {}

        async def read_head(trainer: bytes, scope: trio.CancelScope) -> None:
            chain = self.chain.branch()
            try:
                data = await self._fetch_head(trainer)
                with self._fork_alarm(Head, data):
                    head = chain.accept_head(data, self._node.clock.now(), allow_expired=self._allow_expired)
            except (StoreError, ProtocolError) as error:
                failures[trainer] = error
                return
            chains[-head.epoch, -head.version, trainers.index(trainer)] = chain, trainer
            scope.deadline = min(scope.deadline, trio.current_time() + _OTHER_HEADS_SECONDS)

        async with trio.open_nursery() as nursery:
            for trainer in trainers:
                nursery.start_soon(read_head, trainer, nursery.cancel_scope)
        if not chains:
            raise next(failures[trainer] for trainer in trainers if trainer in failures)
        return [chains[rank] for rank in sorted(chains)]

    async def _fetch_head(self, trainer: bytes) -> bytes:
        """Fetch a trainer's head, unchecked. A fetch that hangs is given up soon, so that the next one can start."""
        path, schedule = paths.head(trainer), self._node.run.schedule
        seconds = max(_HEAD_SECONDS, 0.5 * schedule.rounds * self._node.run.beacon.period_ms / 1000)
        return await answer_of(partial(fetch_envelope, self._node, Head, path), seconds, path)

    async def _follow_chain(self, item: tuple[ChainVerifier, bytes]) -> tuple[ChainVerifier, bytes]:
        """Fetch and check the manifests that a trainer's head lists, in order; return the chain and the trainer."""
        chain, trainer = item

        async def fetch(entry: tuple[int, bytes]) -> bytes:
            return await fetch_envelope(self._node, Manifest, paths.manifest(trainer, *entry))

        async def accept(entry: tuple[int, bytes], data: bytes) -> None:
            with self._fork_alarm(Manifest, data):
                await self._node.run_sync(chain.accept_manifest, entry[0], data)  # seconds, if it has very many tensors

        await fetch_ahead(fetch, chain.missing_manifests(), accept, ahead=_FETCH_AHEAD)
        return item

    async def _fetch_object(self, item: VersionObject) -> bytes:
        """Fetch an object of a version, unless it is a part of a patch that is in memory."""
        ref, version = item.ref, item.manifest.version
        if item.from_anchor:
            return await fetch_object(self._node, paths.anchor(self._trainer, ref.digest), ref)
        data = self._parts.pop((version, ref.digest), None)
        return data or await fetch_object(self._node, paths.patch(self._trainer, ref.digest), ref)

    async def prefetch(self) -> None:
        """Fetch the patches from the newest weights to the head, so that no window's opening waits for them."""
        newest, head = self.newest, self.chain.head
        if newest is None or head is None or newest.version >= head.version:
            return

        async def prefetch_part(item: VersionObject) -> None:
            data = await self._fetch_object(item)
            self._parts[item.manifest.version, item.ref.digest] = data

        try:
            plan = self.chain.plan(newest.version, head.version)
        except GapError:
            return  # the next `rebuild` raises it
        if plan.anchor is None:
            await gather(prefetch_part, _objects(plan.patches[:_FETCH_AHEAD], from_anchor=False))
            self._drop_old_parts()

    async def rebuild(self, version: int) -> VerifiedWeights:
        """Return a version's verified weights, rebuilt unless in memory; StoreError or ProtocolError if it fails."""
        async with self._rebuild_lock:
            with trio.CancelScope() as self._rebuild_scope:
                weights = await self._rebuild(version)
            if self._rebuild_scope.cancel_called:
                self._drop_other_weights()
                raise ChainError("the chain was rewound meanwhile", f"version {version}")
            return weights

    async def _rebuild(self, version: int) -> VerifiedWeights:
        if version in self._weights:
            return self._weights[version]
        base = max((older for older in self._weights if older < version), default=None)
        plan = self.chain.plan(base, version)
        try:
            weights = await self._carry_out(plan, base)
        except (StoreError, ProtocolError) as error:
            slow = None if plan.anchor is not None else self.chain.slow_plan(version)
            newest_older = max((older for older in self._weights if older < version), default=-1)
            if slow is None or slow.anchor is None or slow.anchor.version <= newest_older:
                raise  # the slow path would need the very patch that failed
            self._node.telemetry.event("fast-path-failed", version=version, error=str(error))
            weights = await self._carry_out(slow, None)
        await self._remember(weights)
        return weights

    async def _remember(self, weights: VerifiedWeights) -> None:
        self._weights[weights.version] = weights
        old = [self._weights.pop(version) for version in sorted(self._weights)[: -self._keep]]
        self._drop_old_parts()
        if old:
            await self._node.run_sync(old.clear)  # to give memory back takes long on an event loop

    def _drop_old_parts(self) -> None:
        newest = max(self._weights, default=-1)
        self._parts = {key: data for key, data in self._parts.items() if key[0] > newest}

    async def _carry_out(self, plan: Plan, base: int | None) -> VerifiedWeights:
        """Carry out a plan. After a failure, the last version that was verified before it stays in memory."""
        anchors = [plan.anchor] if plan.anchor is not None else []
        items = [*_objects(anchors, from_anchor=True), *_objects(plan.patches, from_anchor=False)]
        weights = self._weights[base] if plan.anchor is None and base is not None else None
        build: WeightsBuild | None = None
        sizes = [item.ref.size for item in items]
        progress = CatchUpProgress(self._node, items)

        async def add(item: VersionObject, data: bytes) -> None:
            nonlocal weights, build
            if item.from_anchor and item.is_first:
                build = AnchorBuild(item.manifest, self._new_tensors)
            elif item.is_first:
                assert weights is not None
                build = PatchBuild(weights, item.manifest, self._threads, self._new_tensors)
            assert build is not None
            # Objects, and the versions between, are large: worker threads give their memory back.
            objects = [data]
            del data
            await self._node.run_sync(_add_last, build, objects)
            if item.is_last:
                used = [weights, build]
                weights, build = await self._node.run_sync(build.finish), None
                await self._node.run_sync(used.clear)
            progress.add(item)

        try:
            await fetch_ahead(self._fetch_object, items, add, ahead=_FETCH_AHEAD, sizes=sizes, ahead_bytes=_AHEAD_BYTES)
        except (StoreError, ProtocolError):
            if weights is not None and weights.version not in self._weights:
                await self._remember(weights)
            raise
        assert weights is not None
        return weights


def _add_last(build: WeightsBuild, objects: list[bytes]) -> None:
    build.add(objects.pop())


def _objects(manifests: Sequence[Manifest], *, from_anchor: bool) -> list[VersionObject]:
    return [
        VersionObject(manifest, ref, from_anchor, is_first=number == 1, is_last=number == len(refs))
        for manifest, refs in ((manifest, objects_of(manifest, from_anchor)) for manifest in manifests)
        for number, ref in enumerate(refs, 1)
    ]


SECONDS_BETWEEN_REPORTS = 2.0


class CatchUpProgress:
    """Reports the progress of several steps, from version to version, by these objects; of a single step nothing."""

    def __init__(self, node: Node, items: Sequence[VersionObject]) -> None:
        self._node = node
        self._version = items[-1].manifest.version
        self._steps = sum(item.is_last for item in items)
        self._bytes = max(1, sum(item.ref.size for item in items))
        self._applied_bytes = self._finished_steps = 0
        self._start = self._last_report = node.clock.now()

    def add(self, item: VersionObject) -> None:
        """Add the next object, which was applied."""
        self._applied_bytes += item.ref.size
        self._finished_steps += item.is_last
        now, telemetry, is_complete = self._node.clock.now(), self._node.telemetry, self._finished_steps == self._steps
        if self._steps < 2 or not (is_complete or now - self._last_report >= SECONDS_BETWEEN_REPORTS):
            return
        self._last_report, seconds = now, max(1e-3, now - self._start)
        if is_complete:
            telemetry.event("caught-up", version=self._version, bytes=self._bytes, seconds=round(seconds, 3))
            return
        rate = max(1.0, self._applied_bytes / seconds)
        telemetry.event(
            "catching-up",
            version=self._version,
            step=self._finished_steps,
            steps=self._steps,
            percent=round(100 * self._applied_bytes / self._bytes, 1),
            bytes=self._bytes,
            bytes_per_second=round(rate),
            seconds_left=round((self._bytes - self._applied_bytes) / rate),
        )
