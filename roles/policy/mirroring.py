"""Copies what followers read of a run's trainers to another store, and keeps the copy up to date.

Everything is checked as a follower checks it, and written in an order in which no reader of the copy misses anything:
files, anchors and patches, then manifests, then the head. What neither this head nor the one before shows is deleted;
nothing at the first head after a start, because nobody knows then what readers of the copy still use.
"""

from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import trio

from protocol import paths
from protocol.chain.manifest import Head, Manifest
from protocol.chain.verifier import ChainVerifier
from protocol.environments.record import CodeRef
from protocol.objects import ObjectRef
from protocol.run import FileRef
from roles.authority_updates import stored_revision
from roles.gather import STORAGE_ERRORS, gather
from roles.node.identity import Node
from roles.node.retries import WaitReporter
from roles.policy.verified_weights import objects_of
from roles.ports import NotFoundError, ObjectStore
from roles.records import fetch_envelope, fetch_object, fetch_run_file

Ref = ObjectRef | FileRef | CodeRef

_AT_ONCE = 4  # objects
_REPLACED = ("patches", "anchors", "manifests")


class Mirror:
    """A copy, in another store, of the public objects of all trainers of a run, read from the trainers' own spaces."""

    def __init__(self, node: Node, target: ObjectStore) -> None:
        self._node = node
        self._target = target
        self._chains: dict[bytes, ChainVerifier] = {}  # by trainer
        self._heads: dict[bytes, bytes] = {}  # that were copied, by trainer
        self._paths: dict[bytes, set[str]] = {}  # of the copy, by trainer
        self._shown: dict[bytes, set[str]] = {}  # the paths of what the copied head shows, by trainer
        self._revision = 0

    async def keep(self, poll_seconds: float) -> None:
        """Copy what is new for ever."""
        reporter = WaitReporter(self._node.telemetry, "mirror-behind")
        while True:
            try:
                await self.copy()
                reporter.over()
            except STORAGE_ERRORS as error:
                reporter.waiting("storage", error, "the trainer's space shows its objects, and the copy takes them")
            await trio.sleep(self._node.pace(poll_seconds))

    async def copy(self) -> None:
        """Copy what is new: revisions of the authority, then of each trainer; the first failure is raised after all."""
        failures: list[Exception] = []
        trainers = [partial(self._copy_trainer, trainer) for trainer in self._node.authority.trainers]
        works: list[Callable[[], Awaitable[None]]] = [self._copy_revisions, *trainers]
        for work in works:
            try:
                await work()
            except STORAGE_ERRORS as error:
                failures.append(error)
        if failures:
            raise failures[0]

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
        objects = dict(_objects(trainer, head, chain))
        copied = await self._copy_missing(trainer, objects)
        for path, manifest in manifests.items():
            await target.put(path, manifest)
        await target.put(paths.head(trainer), data)
        shown = {
            *files,
            *objects,
            *(paths.manifest(trainer, v, head.digest(v)) for v in range(head.base, head.version + 1)),
        }
        self._paths[trainer] |= shown
        newest_two, self._shown[trainer] = shown | self._shown.get(trainer, self._paths[trainer]), shown
        for path in sorted(self._paths[trainer] - newest_two):
            if path.split("/")[1] in _REPLACED:
                await target.delete(path)
                self._paths[trainer].remove(path)
        self._chains[trainer], self._heads[trainer] = chain, data
        node.telemetry.event("mirrored", version=head.version, copied=copied, objects=len(shown))

    async def _copy_missing(self, trainer: bytes, wanted: dict[str, Ref]) -> int:
        """Copy the objects of some paths that the copy does not have, and return how many these were."""
        missing = [path for path in wanted if path not in self._paths[trainer]]
        await gather(partial(self._copy_object, trainer, wanted), missing, _AT_ONCE)
        return len(missing)

    async def _copy_object(self, trainer: bytes, wanted: dict[str, Ref], path: str) -> None:
        ref = wanted[path]
        if isinstance(ref, ObjectRef):
            data = await fetch_object(self._node, path, ref)
        else:
            data = await fetch_run_file(self._node, ref, [trainer, *self._node.authority.trainers], str(ref))
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


def _objects(trainer: bytes, head: Head, chain: ChainVerifier) -> Iterator[tuple[str, Ref]]:
    """Yield the path and the reference of each patch and anchor that a head says are in storage."""
    for manifest in chain.manifests():
        if manifest.version in head.anchors:
            for ref in objects_of(manifest, True):
                yield paths.anchor(trainer, ref.digest), ref
        if manifest.version >= head.oldest_patch and manifest.patch is not None:
            for ref in manifest.patch.parts:
                yield paths.patch(trainer, ref.digest), ref
