"""The coordinator: it closes every round with one signed manifest, and makes policy versions of the shared weights.

It runs in the publisher's process and signs under the publisher's fence. State and manifest of a round are durable here
before anything shows them; the manifest comes last and is the atomic point. So a coordinator that is killed at any
instruction publishes the same manifest again, and no round is decided twice.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import trio

from protocol import limits, paths
from protocol.digest import Weights
from protocol.encoding import content_digest
from protocol.errors import ProtocolError, SignatureError
from protocol.identity.signing import Signed, sign
from protocol.kernels.inner_products import Matrix
from protocol.objects import ObjectRef
from protocol.outer.comparing import (
    NOTHING_SENT,
    REMEMBERED_ROUNDS,
    Comparison,
    SentRound,
    SentRounds,
    comparison_of,
    part_products,
)
from protocol.outer.dithering import first_state
from protocol.outer.robust import Weighting, weigh_round
from protocol.outer.round_records import (
    AggregatedShare,
    CountedContribution,
    Refusal,
    RefusalReason,
    RoundManifest,
    RoundPointer,
    RoundRules,
)
from protocol.outer.round_shares import plan_round
from protocol.outer.shared_state import SharedState
from protocol.pseudogradient import Payload, parts_of
from roles.gather import gather
from roles.node.identity import Node
from roles.node.retries import WaitReporter, keep_trying
from roles.ports import NotFoundError, StateError, StoreError
from roles.records import open_record
from roles.trainer.outer import round_files
from roles.trainer.outer.round_judging import Attendance, fetch_payload
from roles.trainer.outer.round_reader import delete_rounds
from roles.trainer.outer.round_repair import fetch_pointer_of
from roles.trainer.outer.round_sharing import collect_products
from roles.trainer.spool import SnapshotName, next_version, put_snapshot
from roles.trainer.tensor_shards import TensorSource, delete_below

_CHECKS_AT_ONCE = 4  # of payloads

Checked = dict[bytes, tuple[Payload, Matrix]]
"""The payloads that were checked, by worker, and their projections."""


@dataclass(frozen=True)
class CoordinatorSettings:
    """What a trainer's operator sets."""

    rules: RoundRules  # of the next rounds
    beacon_rounds: int  # length of a round
    payload_seconds: float = 30.0  # of waiting for contributions, and then for payloads, of a closed round
    state_interval: int = 8  # rounds between two states in storage
    shard_bytes: int = 64 * limits.MIB  # size of their shards
    remembered_rounds: int = 64  # how many manifests are read again at a start, to know which groups are used up
    poll_seconds: float = 0.5  # between two looks for contributions
    threads: int = 1  # that compare and apply contributions


@dataclass(frozen=True)
class PublisherLink:
    """How the coordinator depends on the publisher of its process."""

    check_fence: Callable[[], Awaitable[None]]  # raises FencedError if another trainer publishes under this key
    epoch: Callable[[], int]  # returns the publisher's fencing epoch
    genesis: Callable[[], Awaitable[tuple[int, Weights]]]  # returns the newest version and its weights


class Coordinator:
    """Closes the rounds of one run."""

    def __init__(self, node: Node, settings: CoordinatorSettings, publisher: PublisherLink) -> None:
        self._node = node
        self._settings = settings
        self._publisher = publisher
        self._newest: Signed[RoundManifest] | None = None
        self._shared: SharedState  # after the round of the newest manifest; set by `_open`
        self._used: dict[int, frozenset[bytes]] = {}  # groups that the manifest of a number names
        self._pointer: RoundPointer | None = None
        self._previous_shards: tuple[ObjectRef, ...] = ()
        self._sent = SentRounds()  # up to the newest manifest
        self._checks = trio.Semaphore(max(_CHECKS_AT_ONCE, settings.threads))

    async def run(self) -> None:
        """Close rounds for ever."""
        await self._open()
        while True:
            await self._publish()
            await self._close_round()

    async def _open(self) -> None:
        """Go on from this node's own state, or open the first round."""
        node = self._node
        manifests = await round_files.list_manifests(node.state)
        await self._check_published(manifests[-1][0] if manifests else -1)
        if not manifests:
            await self._found()
            return
        for number, trainer in manifests[-self._settings.remembered_rounds :]:
            self._newest = await round_files.get_manifest(node, trainer, number)
            self._remember(self._newest.record)
        assert self._newest is not None
        _, weights = await self._publisher.genesis()
        parts = parts_of({name: tensor.shape for name, tensor in weights.items()})
        self._shared = await round_files.get_state(node, self._newest.record, parts)
        sent = await round_files.get_sent(node.state, self._newest.record.number)
        self._sent = SentRounds(list(sent.values()))
        with suppress(NotFoundError, SignatureError):  # what an earlier key has signed names shards in its own space
            data = await node.state.get(round_files.POINTER, RoundPointer.max_signed_bytes())
            self._pointer = open_record(node, RoundPointer, paths.newest_round(node.key.public), data).record

    async def _check_published(self, newest: int) -> None:
        """Compare this node's own state with the pointer in storage."""
        reporter, until = WaitReporter(self._node.telemetry, "pointer-unread"), "this node's own storage answers"
        read, seconds = partial(fetch_pointer_of, self._node, self._node.key.public), self._settings.poll_seconds
        pointer = await keep_trying(read, reporter, until, seconds)
        if pointer is not None and pointer.record.newest > newest:
            raise StateError(
                round_files.ROUNDS, f"storage shows round {pointer.record.newest}, which this state did not close"
            )

    async def _found(self) -> None:
        """Open the first round with the newest policy version."""
        version, weights = await self._publisher.genesis()
        shared = await self._node.run_sync(first_state, weights, self._settings.rules)
        manifest = await self._manifest(shared, version, (), ())
        await self._record(manifest, shared, NOTHING_SENT)

    async def _manifest(
        self,
        shared: SharedState,
        version: int,
        counted: tuple[CountedContribution, ...],
        refused: tuple[Refusal, ...],
        aggregated: tuple[AggregatedShare, ...] = (),
    ) -> RoundManifest:
        """Return the manifest that closes the present round and opens the next one."""
        node, newest = self._node, self._newest
        while not (workers := tuple(sorted(node.authority.workers))):
            node.telemetry.event("no-workers")
            await trio.sleep(self._settings.poll_seconds)
        await self._publisher.check_fence()  # which may begin a new epoch
        rules = self._settings.rules
        rules = rules.model_copy(update={"quorum": min(rules.quorum, len(workers))})
        beacon_round = max(1, await node.time.wait_for_newest_round())
        if newest is not None:
            beacon_round = max(beacon_round, newest.record.closes)  # which is proven to be out
        return RoundManifest(
            run=node.run_id,
            trainer=node.key.public,
            number=newest.record.number + 1 if newest is not None else 0,
            previous=newest.digest if newest is not None else b"",
            epoch=self._publisher.epoch(),
            counted=counted,
            refused=refused,
            aggregated=aggregated,
            state=shared.digests,
            version=version,
            workers=workers,
            rules=rules,
            beacon_round=beacon_round,
            closes=beacon_round + self._settings.beacon_rounds,
        )

    async def _record(self, manifest: RoundManifest, shared: SharedState, sent: SentRound) -> None:
        """Make a round's end durable here: what the sites sent and the state, and then the manifest."""
        node = self._node
        await round_files.put_sent(node.state, manifest.number, sent)
        await round_files.put_state(node, manifest.number, shared)
        signed = open_record(node, RoundManifest, manifest.path, sign(manifest, node.key))
        await round_files.put_manifest(node.state, signed)
        self._newest, self._shared, self._sent = signed, shared, self._sent.after(sent)
        self._remember(manifest)

    def _remember(self, manifest: RoundManifest) -> None:
        """Remember what a manifest names, as long as it matters."""
        self._used[manifest.number] = frozenset(group for item in manifest.counted for group in item.groups)
        self._used.pop(manifest.number - self._settings.remembered_rounds, None)

    async def _publish(self) -> None:
        """Publish the newest manifest, the policy version of its state, and the pointer."""
        assert self._newest is not None
        node, manifest = self._node, self._newest.record
        is_own = manifest.trainer == node.key.public  # and not of an earlier key, in whose space it is
        if is_own:
            await node.publish(manifest.path, self._newest.data)
        if manifest.version >= await next_version(node.state):
            view = await node.run_sync(self._shared.bf16_view)
            name = SnapshotName(manifest.version, manifest.state.step)
            await put_snapshot(node.state, name, TensorSource.of(view), node.run_sync)
        if is_own:
            await self._publish_pointer()
            await self._clean_up()
        node.telemetry.event(
            "round-closed",
            number=manifest.number,
            step=manifest.state.step,
            version=manifest.version,
            counted=len(manifest.counted),
            refused=",".join(f"{item.worker.hex()[:8]}:{item.reason}" for item in manifest.refused),
        )

    async def _publish_pointer(self) -> None:
        """Publish the pointer; every so many rounds, the shards of the state before it."""
        assert self._newest is not None
        node, manifest, pointer = self._node, self._newest.record, self._pointer
        if pointer is None or manifest.number - pointer.state_number >= self._settings.state_interval:
            refs = []
            async for _, shard in round_files.each_shard(node, self._shared, self._settings.shard_bytes):
                ref = ObjectRef(digest=await node.run_sync(content_digest, shard), size=len(shard))
                await node.publish(paths.state_shard(node.key.public, ref.digest), shard)
                refs.append(ref)
            state_number, shards = manifest.number, tuple(refs)
        else:
            state_number, shards = pointer.state_number, pointer.shards
        self._pointer = RoundPointer(
            run=node.run_id,
            trainer=node.key.public,
            epoch=manifest.epoch,
            newest=manifest.number,
            digest=self._newest.digest,
            state_number=state_number,
            shards=shards,
        )
        data = sign(self._pointer, node.key)
        await node.state.put(round_files.POINTER, data)
        await node.publish(self._pointer.path, data)

    async def _clean_up(self) -> None:
        """Delete old files here, and in storage what no site needs that continues from the state there."""
        assert self._newest is not None and self._pointer is not None
        node, key, number = self._node, self._node.key.public, self._newest.record.number
        recent = set(range(max(0, number - self._settings.remembered_rounds), number + 1))
        await round_files.delete_except(node.state, round_files.ROUNDS, recent)
        await round_files.delete_except(node.state, round_files.STATES, {number})
        compared = set(range(max(0, number + 1 - REMEMBERED_ROUNDS), number + 1))
        await round_files.delete_except(node.state, round_files.SENT, compared)
        await round_files.delete_except(node.state, round_files.SEEN, {number + 1})
        if self._pointer.state_number != number:
            return
        oldest = number - 2 * self._settings.state_interval  # the state before may still be in use
        shards = {paths.state_shard(key, ref.digest) for ref in (*self._pointer.shards, *self._previous_shards)}
        self._previous_shards = self._pointer.shards
        try:
            await delete_rounds(node, {"payloads": oldest + 1, "plans": number + 1, "rounds": oldest})
            await delete_below(node.store, paths.kind_prefix(key, "states"), shards)
        except StoreError as error:
            node.telemetry.event("deletion-failed", error=str(error))

    # The end of a round

    async def _close_round(self) -> None:
        """Wait for the end of the present round, and decide it."""
        assert self._newest is not None
        node, opening = self._node, self._newest
        attendance = Attendance(opening, node.scratch())
        await attendance.recall(node)
        checked: Checked = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, attendance, checked)
            await node.time.wait_for_round(opening.record.closes)
            nursery.cancel_scope.cancel()
        await attendance.look(node, opening.record.workers, self._settings.payload_seconds)
        attendance.check(frozenset().union(*self._used.values()), node.authority.revoked)
        await self._check_payloads(attendance, checked)
        counted, sent, aggregated = await self._counted(attendance, checked)
        await self._look_for_late_ones(attendance)
        shared = self._shared
        if counted:
            factors = [item.factor for item in counted]
            in_order, threads = [checked[item.worker][0] for item in counted], self._settings.threads
            try:
                shared = await node.run_sync(shared.after, in_order, factors, opening.record.rules, threads)
            except ProtocolError as error:  # each is finite, and their sum is not
                node.telemetry.event("round-not-applied", number=attendance.number, error=str(error))
                attendance.refusals.update({item.worker: RefusalReason.POISONED for item in counted})
                counted = ()
        shared = await node.run_sync(shared.with_momentum, self._settings.rules)
        refused = tuple(
            Refusal(worker=worker, reason=str(reason)) for worker, reason in sorted(attendance.refusals.items())
        )
        version = opening.record.version + (1 if counted else 0)
        manifest = await self._manifest(shared, version, counted, refused, aggregated)
        await self._record(manifest, shared, sent)

    async def _watch(self, attendance: Attendance, checked: Checked) -> None:
        """Look for contributions, and check each when it comes, so that little is left when the round is over. Only
        those that have not come are looked for: what a site signed twice is seen at the end.
        """
        tried = set[bytes]()
        async with trio.open_nursery() as checks:
            while True:
                absent_workers = set(attendance.opening.record.workers).difference(attendance.contributions)
                await attendance.look(self._node, sorted(absent_workers), self._settings.payload_seconds)
                for worker in [worker for worker in attendance.sound() if worker not in tried]:
                    tried.add(worker)
                    checks.start_soon(self._check_payload, attendance, checked, worker)
                await trio.sleep(self._settings.poll_seconds)

    async def _check_payload(self, attendance: Attendance, checked: Checked, worker: bytes) -> None:
        """Check the payload of a contribution, as soon as storage has it, and refuse it if it fails."""
        while True:
            try:
                checked[worker] = await fetch_payload(self._node, attendance, worker, self._shared, self._checks)
            except StoreError as error:
                attendance.event("payload-unread", self._node, worker, error)
                await trio.sleep(self._settings.poll_seconds)
                continue
            except ProtocolError as error:
                attendance.event("contribution-refused", self._node, worker, error)
                attendance.refusals.setdefault(worker, RefusalReason.MALFORMED)
            return

    async def _check_payloads(self, attendance: Attendance, checked: Checked) -> None:
        """Check the payloads that are not checked yet; refuse contributions without one."""
        workers = [worker for worker in attendance.sound() if worker not in checked]
        with trio.move_on_after(self._settings.payload_seconds):
            # one that withholds its payload takes nobody's place
            await gather(partial(self._check_payload, attendance, checked), workers, len(workers))
        for worker in workers:
            if worker not in checked:
                attendance.refusals.setdefault(worker, RefusalReason.WITHHELD)

    async def _compare(
        self, attendance: Attendance, checked: Checked
    ) -> tuple[Comparison, tuple[AggregatedShare, ...]]:
        """Compare the sound contributions, alone or with their sites."""
        node, settings, opening, workers = self._node, self._settings, attendance.opening, attendance.sound()
        payloads, projections = [checked[worker][0] for worker in workers], [checked[worker][1] for worker in workers]
        rules, shared = opening.record.rules, self._shared
        compute = partial(node.run_sync, part_products, shared, payloads, rules, settings.threads)
        compare = partial(node.run_sync, comparison_of, shared, payloads, rules, projections)
        contributions = [attendance.contributions[worker].record for worker in workers]
        plan = plan_round(opening, contributions, node.key.public)
        if plan is None:
            return await compare(await compute()), ()
        times = (settings.payload_seconds, settings.poll_seconds)
        return await collect_products(node, plan, shared.stream_parts(rules), compute, compare, *times)

    async def _counted(
        self, attendance: Attendance, checked: Checked
    ) -> tuple[tuple[CountedContribution, ...], SentRound, tuple[AggregatedShare, ...]]:
        """Return the contributions that count, after copying their payloads to this node's space, what all sent, and
        who compared it.
        """
        node, rules, workers = self._node, attendance.opening.record.rules, attendance.sound()

        async def copy(worker: bytes) -> None:
            for file in checked[worker][0]:
                data = await node.run_sync(file.__getitem__, slice(None))
                digest = await node.run_sync(content_digest, data)
                await node.publish(paths.payload(node.key.public, attendance.number, digest), data)

        await gather(copy, workers, _CHECKS_AT_ONCE)
        comparison, aggregated = await self._compare(attendance, checked)
        weighting: Weighting = await node.run_sync(weigh_round, workers, comparison, self._sent)
        factors = dict(zip(workers, weighting.factors, strict=True))
        for worker, cosine, drift in zip(workers, weighting.cosines, weighting.drift_factors, strict=True):
            norm = attendance.contributions[worker].record.norm
            node.telemetry.event(
                "contribution-weighed",
                number=attendance.number,
                worker=worker.hex()[:16],
                cosine=cosine,
                norm=norm,
                factor=factors[worker],
                drift_factor=drift,
            )
            if factors[worker] == 0:
                attendance.refusals[worker] = RefusalReason.POISONED
        remaining = attendance.sound()
        if len(remaining) < rules.quorum:
            attendance.refusals.update(dict.fromkeys(remaining, RefusalReason.QUORUM))
            return (), weighting.sent, aggregated
        counted = []
        for worker in remaining:
            signed = attendance.contributions[worker]
            counted.append(
                CountedContribution(
                    worker=worker,
                    contribution=signed.digest,
                    payload=signed.record.payload,
                    groups=signed.record.groups,
                    factor=factors[worker],
                )
            )
        return tuple(counted), weighting.sent, aggregated

    async def _look_for_late_ones(self, attendance: Attendance) -> None:
        """Say of each worker without a contribution whether one has come meanwhile."""
        seen_workers = attendance.contributions.keys() | attendance.refusals.keys()
        absent_workers = [worker for worker in attendance.opening.record.workers if worker not in seen_workers]
        await attendance.look(self._node, absent_workers, self._settings.payload_seconds)
        for worker in absent_workers:
            came = worker in attendance.contributions or worker in attendance.refusals
            attendance.refusals[worker] = RefusalReason.LATE if came else RefusalReason.LOST
