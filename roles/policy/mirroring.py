"""Copies what followers read of a run's trainers to another store, and keeps the copy up to date.

Everything is checked as a follower checks it, and written in an order in which no reader of the copy misses anything:
files and patches, then manifests, then the head. Anchors precede the first head of a start, and follow later ones: they
are computed from the anchor before and the patches since, which the copy has, so that mirrors take from a trainer what
its followers take. Only an anchor that this does not give is fetched. What neither this head nor the one before shows
is deleted; nothing at the first head after a start, because nobody knows then what readers of the copy still use.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

import trio

from protocol import paths
from protocol.chain import safetensors
from protocol.chain.manifest import Head, Manifest
from protocol.chain.verifier import ChainVerifier
from protocol.encoding import content_digest
from protocol.environments.record import CodeRef
from protocol.errors import GapError
from protocol.objects import ObjectRef
from protocol.patch import NewTensors
from protocol.run import FileRef
from roles.authority_updates import stored_revision
from roles.gather import STORAGE_ERRORS, gather
from roles.node.identity import Node
from roles.node.retries import Pause, WaitReporter
from roles.policy.serving import HeadPace
from roles.policy.verified_weights import AnchorBuild, PatchBuild
from roles.ports import NotFoundError, ObjectStore
from roles.records import fetch_envelope, fetch_object, fetch_run_file

Ref = ObjectRef | FileRef | CodeRef

_AT_ONCE = 4  # objects
_REPLACED = ("patches", "anchors", "manifests")
_ANCHOR_PAUSE = Pause(first=1.0, longest=300.0)  # before anchors that could not be copied are computed again


class Mirror:
    """A copy, in another store, of the public objects of all trainers of a run, read from the trainers' own spaces."""

    def __init__(self, node: Node, target: ObjectStore, new_tensors: NewTensors | None = None) -> None:
        """Copy to `target`, which is read, too; weights of which anchors are computed lie where `new_tensors` says."""
        self._node = node
        self._target = target
        self._new_tensors = new_tensors
        self._chains: dict[bytes, ChainVerifier] = {}  # by trainer
        self._heads: dict[bytes, bytes] = {}  # that were copied, by trainer
        self._paths: dict[bytes, set[str]] = {}  # of the copy, by trainer
        self._shown: dict[bytes, set[str]] = {}  # the paths of what the copied head shows, by trainer
        # By trainer: trio's time of the next try to copy its anchors, the pause before it, and why the last one failed.
        self._failures: dict[bytes, tuple[float, float, Exception]] = {}
        self._revision = 0

    async def keep(self, poll_seconds: float) -> None:
        """Copy what is new for ever; no head waits for an anchor."""
        async with trio.open_nursery() as nursery:
            for work in (self._copy_heads, self._copy_new_anchors):
                nursery.start_soon(self._repeat, work, poll_seconds)

    async def _repeat(self, work: Callable[[], Awaitable[None]], poll_seconds: float) -> None:
        reporter, pace = WaitReporter(self._node.telemetry, "mirror-behind"), HeadPace(self._node, poll_seconds)
        while True:
            try:
                await work()
                reporter.over()
            except STORAGE_ERRORS as error:
                reporter.waiting("storage", error, "the trainer's space shows its objects, and the copy takes them")
            versions = [chain.head.version for chain in self._chains.values() if chain.head is not None]
            await trio.sleep(pace.pause(max(versions, default=-1)))

    async def copy(self) -> None:
        """Copy what is new: revisions of the authority, then of each trainer; the first failure is raised after all."""
        await self._copy_heads()
        await self._copy_new_anchors()

    async def _copy_heads(self) -> None:
        trainers = [partial(self._copy_trainer, trainer) for trainer in self._node.authority.trainers]
        await _do_all([self._copy_revisions, *trainers])

    async def _copy_new_anchors(self) -> None:
        trainers = [trainer for trainer in self._node.authority.trainers if trainer in self._chains]
        await _do_all([partial(self._copy_anchors, trainer, self._chains[trainer]) for trainer in trainers])

    async def _copy_revisions(self) -> None:
        while self._revision < self._node.revisions.number:
            number = self._revision + 1
            data = await stored_revision(self._node, number)  # wherever the node found it
            for trainer in self._node.authority.trainers:
                await self._target.put(paths.revision_copy(trainer, number), data)
            self._revision = number

    async def _copy_trainer(self, trainer: bytes) -> None:
        try:
            data = await fetch_envelope(self._node, Head, paths.head(trainer))
        except NotFoundError:
            if trainer in self._heads or len(self._node.authority.trainers) == 1:
                raise
            return  # one of several, which has published nothing yet
        if data != self._heads.get(trainer):
            await self._copy_chain(trainer, data)

    async def _copy_chain(self, trainer: bytes, data: bytes) -> None:
        node, target = self._node, self._target
        if trainer not in self._paths:
            self._paths[trainer] = {info.path async for info in target.list(paths.writer_prefix(trainer))}
        files = dict(self._files(trainer))
        await self._copy_missing(trainer, files)
        verifier = self._chains.get(trainer) or ChainVerifier(node.run_id, node.run, None, node.revisions)
        chain, manifests = verifier.branch(), dict[str, bytes]()
        head = chain.accept_head(data, node.clock.now())
        for version, digest in chain.missing_manifests():
            path = paths.manifest(trainer, version, digest)
            manifests[path] = await fetch_envelope(node, Manifest, path)
            await node.run_sync(chain.accept_manifest, version, manifests[path])
        patches = {
            paths.patch(trainer, ref.digest): ref
            for manifest in chain.manifests()
            if manifest.version >= head.oldest_patch and manifest.patch is not None
            for ref in manifest.patch.parts
        }
        anchors = {path: ref for version in head.anchors for path, ref in _shards(trainer, chain, version).items()}
        copied = await self._copy_missing(trainer, patches)
        if trainer not in self._heads:
            await self._copy_anchors(trainer, chain)
        for path, manifest in manifests.items():
            await target.put(path, manifest)
        await target.put(paths.head(trainer), data)
        named = {paths.manifest(trainer, v, head.digest(v)) for v in range(head.base, head.version + 1)}
        self._paths[trainer] |= named
        shown = {*files, *patches, *anchors, *named}
        newest_two, self._shown[trainer] = shown | self._shown.get(trainer, self._paths[trainer]), shown
        for path in sorted(self._paths[trainer] - newest_two):
            if path.split("/")[1] in _REPLACED:
                await target.delete(path)
                self._paths[trainer].remove(path)
        self._chains[trainer], self._heads[trainer] = chain, data
        node.telemetry.event("mirrored", version=head.version, copied=copied, objects=len(shown))

    async def _copy_anchors(self, trainer: bytes, chain: ChainVerifier) -> None:
        """Copy the head's anchors, oldest first. A failure is raised again until it is time for the next try."""
        pause = 0.0
        if trainer in self._failures:
            next_try, pause, failure = self._failures[trainer]
            if trio.current_time() < next_try:
                raise failure.with_traceback(None)
        try:
            assert chain.head is not None
            for version in chain.head.anchors:
                shards = _shards(trainer, chain, version)
                if not shards.keys() <= self._paths[trainer]:
                    with suppress(*STORAGE_ERRORS):
                        await self._compute_anchor(trainer, chain, version)
                    fetched = await self._copy_missing(trainer, shards)
                    self._node.telemetry.event("anchor-mirrored", version=version, shards=len(shards), fetched=fetched)
        except STORAGE_ERRORS as error:
            pause = _ANCHOR_PAUSE.after(pause)
            self._failures[trainer] = trio.current_time() + pause, pause, error
            raise
        self._failures.pop(trainer, None)

    async def _compute_anchor(self, trainer: bytes, chain: ChainVerifier, version: int) -> None:
        """Compute an anchor from the one before it, whose files say which tensors are in which shard, and from the
        patches since. StoreError or ProtocolError if the copy does not have these.
        """
        run_sync, target, manifest = self._node.run_sync, self._target, chain.manifest(version)
        if manifest.patch is None or not version:
            raise GapError("no patch leads there", f"version {version}")
        plan = chain.slow_plan(version - 1)
        assert plan.anchor is not None
        start, names = AnchorBuild(plan.anchor, self._new_tensors), list[list[str]]()
        for path, ref in _shards(trainer, chain, plan.anchor.version).items():
            shard = await target.get(path, ref.size)
            names.append(sorted(await run_sync(safetensors.read, shard)))
            await run_sync(start.add, shard)
        weights = await run_sync(start.finish)
        for step in (*plan.patches, manifest):
            build = PatchBuild(weights, step, new_tensors=dict)  # in place: nobody else has these weights
            assert step.patch is not None
            for ref in step.patch.parts:
                await run_sync(build.add, await target.get(paths.patch(trainer, ref.digest), ref.size))
            weights = await run_sync(build.finish)
        for own, ref in zip(names, manifest.anchor, strict=False):
            data = await run_sync(safetensors.write, {name: weights.weights[name] for name in own})
            if await run_sync(content_digest, data) == ref.digest:
                await self._put(trainer, paths.anchor(trainer, ref.digest), data)

    async def _copy_missing(self, trainer: bytes, wanted: Mapping[str, Ref]) -> int:
        """Copy the objects of some paths that the copy does not have, and return how many these were."""
        missing = [path for path in wanted if path not in self._paths[trainer]]
        await gather(partial(self._copy_object, trainer, wanted), missing, _AT_ONCE)
        return len(missing)

    async def _copy_object(self, trainer: bytes, wanted: Mapping[str, Ref], path: str) -> None:
        ref = wanted[path]
        if isinstance(ref, ObjectRef):
            data = await fetch_object(self._node, path, ref)
        else:
            data = await fetch_run_file(self._node, ref, [trainer, *self._node.authority.trainers], str(ref))
        await self._put(trainer, path, data)

    async def _put(self, trainer: bytes, path: str, data: bytes) -> None:
        await self._target.put(path, data)
        self._paths[trainer].add(path)

    def _files(self, trainer: bytes) -> Iterator[tuple[str, Ref]]:
        """Yield the path and the reference of each file of the run that a trainer publishes."""
        run = self._node.run
        data = () if run.data is None else (run.data,)
        base = () if run.lora is None else run.lora.shards
        for ref in (
            *run.model.files,
            *data,
            *base,
            *(code for task in run.tasks if task.is_plugin for code in task.code),
        ):
            yield paths.file(trainer, ref.digest), ref


def _shards(trainer: bytes, chain: ChainVerifier, version: int) -> dict[str, ObjectRef]:
    """Return the reference of each shard of a version's anchor, in order, by its path."""
    return {paths.anchor(trainer, ref.digest): ref for ref in chain.manifest(version).anchor}


async def _do_all(works: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Do some works one after the other; the first failure is raised after all."""
    failures: list[Exception] = []
    for work in works:
        try:
            await work()
        except STORAGE_ERRORS as error:
            failures.append(error)
    if failures:
        raise failures[0]
