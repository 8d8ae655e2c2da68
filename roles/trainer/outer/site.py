"""A site: local steps from the shared weights, one contribution a round, and the step that the round manifest decides.

A site has two states of its own, the error feedback and the learner's state without the masters. Both are stored for
the case that the contribution counts, before anything of it is uploaded; the old ones stay until the manifest decides.
So a site that is killed at any instruction sends the same bytes again, and settles each round once.
"""

from typing import Final

import trio

from protocol import limits, paths
from protocol.digest import Weights, digest_weights
from protocol.encoding import content_digest
from protocol.errors import ForkError, ProtocolError
from protocol.identity.signing import Signed, claimed_signers, sign
from protocol.outer.local_work import LocalWork, State, encode_work, masters, without_masters
from protocol.outer.round_checks import check_next_manifest, sender_digest, turn_of
from protocol.outer.round_records import Refusal, RefusalReason, RoundContribution, RoundManifest
from protocol.outer.shared_state import SharedState
from protocol.pseudogradient import Part, Payload, parts_of
from roles.gather import STORAGE_ERRORS, first_failure
from roles.node.identity import Node
from roles.node.retries import WaitReporter
from roles.ports import NotFoundError, StateError, StoreError, TooLargeError
from roles.records import open_record
from roles.trainer.outer import round_files
from roles.trainer.outer.local_steps import GroupPool, LocalLearner, LocalSteps, SiteSettings
from roles.trainer.outer.round_files import SiteRecord, UsedGroup, numbered
from roles.trainer.outer.round_reader import (
    FetchedFiles,
    delete_old_contributions,
    fetch_manifest,
    fetch_past_manifests,
    fetch_payloads,
    fetch_pointer,
    fetch_state,
)
from roles.trainer.outer.round_sharing import compute_share
from roles.trainer.spool import Inbox
from roles.trainer.tensor_shards import delete_below, shard_path

_NO_FILE: Final = -1


class Site:
    """One site of a run. `learner` takes the local steps; its present state is that of a new site."""

    def __init__(self, node: Node, learner: LocalLearner, settings: SiteSettings) -> None:
        self._node = node
        self._settings = settings
        inbox, filters = Inbox(node.state), settings.dynamic_filtering
        self._pool = GroupPool(inbox, node.run_id, settings.max_staleness, dynamic_filtering=filters)
        self._steps = LocalSteps(node, learner, self._pool, settings)
        self._end: Weights | None = None  # of this round's local steps, if more are taken while the round closes
        initial = learner.state()
        self._new_inner = without_masters(initial)
        self._parts: tuple[Part, ...] = parts_of({name: tensor.shape for name, tensor in masters(initial).items()})
        self._record: SiteRecord | None = None
        self._opening: Signed[RoundManifest]  # opens the present round; set by `_open`
        self.shared: SharedState | None = None  # with which it begins; None before the first
        self._fetched = FetchedFiles(node.scratch())  # of the present round
        self._may_have_signed = True  # for the present round, with a state that was lost or set back since

    async def run(self) -> None:
        """Take part in every round, for ever."""
        await self._open()
        while True:
            prepared = await self._contribution()
            async with first_failure(*STORAGE_ERRORS) as tasks:
                if self._end is not None and prepared is not None:
                    used = frozenset(prepared.record.groups)
                    tasks.start_soon(self._steps.go_ahead, self._opening.record, self._end, used)
                if prepared is not None:
                    await self._publish(prepared)
                    if self._opening.record.rules.spread:
                        tasks.start_soon(self._compute_share)
                closing = await self._closing_manifest()
                shared = None if closing is None else await self._applied(closing.record)
                tasks.cancel_scope.cancel()
            await self._settle(closing, shared)
            self._fetched = FetchedFiles(self._node.scratch())
            await delete_old_contributions(self._node, self._opening.record.number)

    async def _open(self) -> None:
        """Go on from this site's own state, or from the state in storage if there is none."""
        state = self._node.state
        try:
            data = await state.get(round_files.SITE, SiteRecord.max_bytes)
        except NotFoundError:
            await self._adopt_state(None)
        else:
            record = SiteRecord.from_bytes(data)
            opening = await round_files.get_manifest(self._node, record.trainer, record.number)
            self.shared = await round_files.get_state(self._node, opening.record, self._parts)
            self._record, self._opening = record, opening
            self._pool.use_up(used.group for used in record.used)
        await self._clean_up()

    async def _adopt_state(self, trusted: RoundManifest | None) -> None:
        """Fetch a whole state, as often as it takes. The error feedback begins with 0."""
        node = self._node
        self._may_have_signed = True  # to a round of the history that is adopted
        with WaitReporter(node.telemetry, "state-unread") as reporter:
            while True:
                try:
                    opening, shared = await fetch_state(node, self._parts, trusted)
                    manifests = await fetch_past_manifests(node, opening, self._settings.max_staleness + 1)
                    break
                except ForkError:
                    raise
                except STORAGE_ERRORS as error:
                    reporter.waiting("state", error, "the trainer's storage shows a state of an open round")
                    await trio.sleep(self._settings.poll_seconds)
        used = tuple(
            UsedGroup(group=group, step=signed.record.state.step - 1)
            for signed in manifests
            for item in signed.record.counted
            for group in item.groups
        )
        if self._record is not None:
            dealt_groups = {item.group for item in used}
            used += tuple(item for item in self._record.used if item.group not in dealt_groups)
        inner = self._record.inner if self._record is not None else _NO_FILE
        await self._become(opening, shared, _NO_FILE, inner, used)
        await delete_below(node.state, round_files.DOWNLOAD)
        node.telemetry.event("state-adopted", number=opening.record.number, step=shared.step)

    async def _become(
        self,
        opening: Signed[RoundManifest],
        shared: SharedState,
        feedback: int,
        inner: int,
        used: tuple[UsedGroup, ...],
    ) -> None:
        """Begin the round that a manifest opens. The record is the atomic point."""
        node, number = self._node, opening.record.number
        await round_files.put_state(node, number, shared)
        await round_files.put_manifest(node.state, opening)
        recent = tuple(item for item in used if shared.step - item.step <= self._settings.max_staleness + 1)
        record = SiteRecord(number=number, trainer=opening.record.trainer, feedback=feedback, inner=inner, used=recent)
        await node.state.put(round_files.SITE, record.to_bytes())
        self._pool.use_up(item.group for item in recent)
        self._record, self._opening, self.shared = record, opening, shared

    async def _clean_up(self) -> None:
        """Delete what the record does not name."""
        assert self._record is not None
        state, record = self._node.state, self._record
        await round_files.delete_except(state, round_files.STATES, {record.number})
        await round_files.delete_except(state, round_files.ROUNDS, {record.number})
        await round_files.delete_except(state, round_files.PREPARED, {record.number + 1})
        await round_files.delete_except(state, round_files.PAYLOAD, {record.number + 1})
        await round_files.delete_except(state, round_files.FEEDBACK, {record.feedback, record.number + 1})
        await round_files.delete_except(state, round_files.INNER, {record.inner, record.number + 1})

    # Local steps and contribution

    async def _contribution(self) -> Signed[RoundContribution] | None:
        """Return this site's contribution to the present round; None if there is no time or work for one."""
        node, opening = self._node, self._opening.record
        if node.key.public not in opening.workers:
            return None
        prepared = await self._prepared()
        if prepared is None and not (self._may_have_signed and await self._has_signed(opening.number + 1)):
            prepared = await self._prepare()
            self._may_have_signed = self._may_have_signed and prepared is None
        if prepared is not None and prepared.record.worker != node.key.public:
            prepared = None  # an earlier key's, which may count: this key sends nothing of it again
        if prepared is None:
            node.telemetry.event("nothing-to-contribute", number=opening.number + 1)
        return prepared

    async def _publish(self, prepared: Signed[RoundContribution]) -> None:
        """Publish this site's contribution to the present round."""
        node, record = self._node, prepared.record
        folder = f"{numbered(round_files.PAYLOAD, record.number)}/"
        files = [item.path async for item in node.state.list(folder)]
        for path in sorted(files, reverse=True):  # the first file, which names the others, is there after them
            data = await node.state.get(path, limits.MAX_SHARD_BYTES)
            digest = await node.run_sync(content_digest, data)
            await node.publish(paths.payload(node.key.public, record.number, digest), data)
        await node.publish(record.path, prepared.data)
        node.telemetry.event(
            "contributed",
            number=record.number,
            local_steps=record.local_steps,
            groups=len(record.groups),
            payload_bytes=record.payload.total,
            norm=record.norm,
        )

    async def _has_signed(self, number: int) -> bool:
        """Return whether storage has, or may have, a contribution of this site that its state does not know."""
        try:
            await self._node.store.get(paths.contribution(self._node.key.public, number), 1, size=1)
        except NotFoundError:
            return False
        except StoreError as error:
            self._node.telemetry.event("contribution-unread", number=number, error=str(error))
        return True

    async def _prepared(self) -> Signed[RoundContribution] | None:
        """Return the contribution that this site has signed for the present round, maybe with an earlier key; None if
        it has not.
        """
        node, number = self._node, self._opening.record.number + 1
        try:
            path = numbered(round_files.PREPARED, number)
            data = await node.state.get(path, RoundContribution.max_signed_bytes())
        except NotFoundError:
            return None
        signer = claimed_signers(data, RoundContribution)[0]
        signed = open_record(node, RoundContribution, paths.contribution(signer, number), data)
        return signed if signed.record.opening == self._opening.digest else None

    async def _prepare(self) -> Signed[RoundContribution] | None:
        """Take the local steps and make a contribution of them durable; None if no step could be taken in time."""
        assert self.shared is not None and self._record is not None
        node, opening, shared, record = self._node, self._opening.record, self.shared, self._record
        number, steps = opening.number + 1, self._steps
        inner: State = self._new_inner
        if steps.number != number:
            if record.inner >= 0:
                inner = await round_files.get_tensors(node, numbered(round_files.INNER, record.inner))
            try:
                await steps.begin(number, inner, shared.weights)
            except ValueError as error:
                place = numbered(round_files.INNER, record.inner)
                raise StateError(f"{place} of this node's state", str(error)) from error
        await steps.take(opening)
        if not steps.count:
            return None
        state = await steps.state()
        feedback = None
        if record.feedback >= 0 and opening.rules.uses_feedback(shared.step):
            feedback = await round_files.get_tensors(node, numbered(round_files.FEEDBACK, record.feedback))
        sender = sender_digest(self._opening.digest, node.key.public)
        file_bytes = max(limits.MIN_PAYLOAD_FILE_BYTES, self._settings.file_bytes)
        work: LocalWork = await node.run_sync(
            encode_work, shared, state, feedback, opening.rules, sender, file_bytes, node.scratch()
        )
        await self._put_payload(number, work.payload)
        await round_files.put_tensors(node, numbered(round_files.FEEDBACK, number), work.feedback)
        await round_files.put_tensors(node, numbered(round_files.INNER, number), work.inner)
        contribution = RoundContribution(
            run=node.run_id,
            worker=node.key.public,
            number=number,
            opening=self._opening.digest,
            state=shared.digests,
            payload=await node.run_sync(work.reference),
            groups=tuple(sorted(steps.groups)),
            local_steps=steps.count,
            norm=work.norm,
            feedback=await node.run_sync(digest_weights, work.feedback) if work.feedback else b"",
            beacon_round=max(1, await node.time.wait_for_newest_round()),
        )
        data = sign(contribution, node.key)
        await node.state.put(numbered(round_files.PREPARED, number), data)
        # What was not sent is counted from the shared weights on, which it does not change.
        not_sent = {name: shared.weights[name] for name in shared.weights.keys() - shared.stream(opening.rules)}
        self._end = {**masters(state), **not_sent} if opening.rules.delay else None
        tensors = [state, work, feedback, inner]
        del state, work, feedback, inner
        await node.run_sync(tensors.clear)  # to give memory back takes long on an event loop
        return open_record(node, RoundContribution, contribution.path, data)

    async def _put_payload(self, number: int, payload: Payload) -> None:
        """Store the files of a payload in this site's state."""
        node, folder = self._node, f"{numbered(round_files.PAYLOAD, number)}/"
        await delete_below(node.state, folder)  # of a process that was killed
        for place, file in enumerate(payload):
            await node.state.put(shard_path(folder, place), await node.run_sync(file.__getitem__, slice(None)))

    # The end of a round

    async def _compute_share(self) -> None:
        assert self.shared is not None
        node, settings = self._node, self._settings
        try:
            await compute_share(
                node, self._opening, self.shared, self._fetched, settings.threads, settings.poll_seconds
            )
        except ProtocolError as error:  # of payloads that the coordinator found sound
            node.telemetry.event("round-not-applied", number=self._opening.record.number + 1, error=str(error))

    async def _closing_manifest(self) -> Signed[RoundManifest] | None:
        """Wait for the manifest that closes the present round; None if a whole state must be fetched instead."""
        node, opening = self._node, self._opening
        while True:
            try:
                signed = await fetch_manifest(node, opening.record.number + 1)
                check_next_manifest(opening, signed)
            except NotFoundError:
                if await self._is_behind(opening.record.number):
                    return None
            except ForkError as error:
                if signed.record.epoch <= opening.record.epoch:
                    node.alarm(f"round manifests: {error}")
                    raise
                return None  # another coordinator took over, and went on from an earlier round
            except (StoreError, TooLargeError, ProtocolError) as error:
                node.telemetry.event("round-unread", number=opening.record.number + 1, error=str(error))
            else:
                return signed
            await trio.sleep(self._settings.poll_seconds)

    async def _is_behind(self, number: int) -> bool:
        """Return whether storage has the state of a later round, so that what leads there may be gone."""
        if self._node.time.now() < self._node.run.beacon.round_time(self._opening.record.closes):
            return False
        try:
            return (await fetch_pointer(self._node)).state_number > number
        except (StoreError, TooLargeError, ProtocolError):
            return False

    async def _settle(self, closing: Signed[RoundManifest] | None, shared: SharedState | None) -> None:
        """Settle the present round, and begin the next one. A whole state is fetched if there is no closing manifest,
        or if this site computes another state after the round, or cannot compute it any more (`shared` is None).
        """
        assert self.shared is not None and self._record is not None
        node, opening, record = self._node, self._opening.record, self._record
        prepared, self._end = await self._prepared(), None
        if closing is None:
            self._steps.drop()
            await self._adopt_state(opening)
            await self._clean_up()
            return
        worker = node.key.public if prepared is None else prepared.record.worker
        manifest, own = closing.record, closing.record.counted_digest(worker)
        used = [UsedGroup(group=group, step=opening.state.step) for item in manifest.counted for group in item.groups]
        if shared is None:
            self._steps.drop()
            await self._adopt_state(manifest if await self._is_behind(manifest.number) else None)
            await self._clean_up()
            return
        feedback, inner = record.feedback, record.inner
        if own is not None and prepared is not None and prepared.digest == own:
            inner = manifest.number
            feedback = manifest.number if opening.rules.uses_feedback(opening.state.step) else feedback
        else:
            self._steps.drop()  # steps ahead began where steps ended that do not count
            if Refusal(worker=worker, reason=RefusalReason.POISONED) in manifest.refused:
                feedback = inner = _NO_FILE  # what they hold would make the next contribution like the refused one
            elif own is not None:  # this state was lost or set back since, so its feedback is not the counted one's
                feedback = _NO_FILE
                node.telemetry.event("contribution-unknown", number=manifest.number)
        await self._become(closing, shared, feedback, inner, (*record.used, *used))
        await self._clean_up()
        if self._steps.number == manifest.number + 1:
            await self._steps.settle(manifest, shared)
        self._report(manifest, opening)

    async def _applied(self, manifest: RoundManifest) -> SharedState | None:
        """Return the state after a round; None if this site computes another one than the manifest gives, or if the
        payloads are no longer in storage, and a later state is.
        """
        assert self.shared is not None
        node, rules = self._node, self._opening.record.rules
        while True:
            try:
                parts = self.shared.stream_parts(rules)
                payloads = await fetch_payloads(
                    node, manifest.trainer, manifest.number, manifest.counted, parts, self._fetched
                )
                factors = [item.factor for item in manifest.counted]
                shared: SharedState = await node.run_sync(
                    self.shared.after, payloads, factors, rules, self._settings.threads
                )
            except StoreError as error:
                node.telemetry.event("payload-unread", number=manifest.number, error=str(error))
                if isinstance(error, NotFoundError) and await self._is_behind(manifest.number):
                    return None
                await trio.sleep(self._settings.poll_seconds)
                continue
            except ProtocolError as error:
                node.telemetry.event("round-not-applied", number=manifest.number, error=str(error))
                return None
            shared = await node.run_sync(shared.with_momentum, manifest.rules)
            if shared.digests != manifest.state:
                node.alarm(f"round {manifest.number}: this site computes another state than the round manifest gives")
                return None
            return shared

    def _report(self, manifest: RoundManifest, opening: RoundManifest) -> None:
        node = self._node
        node.telemetry.event(
            "round-applied",
            number=manifest.number,
            step=manifest.state.step,
            version=manifest.version,
            counted=len(manifest.counted),
            counts_own=int(manifest.counted_digest(node.key.public) is not None),
            state=manifest.state.weights.hex()[:16],
        )
        for refusal in manifest.refused:
            turns = {turn_of(manifest.number, opening.rules.delay)}
            groups = self._pool.dealt(turns, opening.workers, refusal.worker)
            node.telemetry.event(
                "site-refused",
                number=manifest.number,
                worker=refusal.worker.hex()[:16],
                reason=refusal.reason,
                groups=len(groups),  # which are dealt again
            )
