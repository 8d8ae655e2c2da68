"""A site: local steps from the shared weights, one contribution a round, and the step that the round manifest decides.

A site has two states of its own, the error feedback and the learner's state without the masters. Both are stored for
the case that the contribution counts, before anything of it is uploaded; the old ones stay until the manifest decides.
So a site that is killed at any instruction sends the same bytes again, and settles each round once.
"""

from dataclasses import dataclass
from typing import Final

import trio

from protocol import paths
from protocol.chain.manifest import ObjectRef
from protocol.digest import content_digest, digest_weights
from protocol.errors import ForkError, ProtocolError
from protocol.identity.signing import Signed, sign
from protocol.outer.round_checks import check_next_manifest
from protocol.outer.round_records import RoundContribution, RoundManifest, RoundRules
from protocol.outer.shared_state import SharedState
from protocol.pseudogradient import Part, parts_of
from roles.node.change_reporter import ChangeReporter
from roles.node.identity import Node
from roles.ports import NotFoundError, StoreError, TooLargeError
from roles.records import open_record
from roles.trainer.outer import round_files
from roles.trainer.outer.contribution_retention import delete_old_contributions
from roles.trainer.outer.group_pool import GroupPool
from roles.trainer.outer.local_learner import LocalLearner, StepFigures, masters, with_masters, without_masters
from roles.trainer.outer.local_work import LocalWork, encode_work
from roles.trainer.outer.round_files import SiteRecord, UsedGroup, numbered
from roles.trainer.outer.round_reader import (
    fetch_manifest,
    fetch_payloads,
    fetch_pointer,
    fetch_state,
    fetch_used_groups,
    forget_downloads,
)

_NO_FILE: Final = -1


@dataclass(frozen=True)
class SiteSettings:
    """What a site's operator sets.

    Attributes:
        groups_per_step: groups of one local step.
        max_staleness: versions behind the newest; older groups are not used.
        upload_seconds: how long before the round closes the site stops its local steps.
        poll_seconds: how often it looks for groups and for the next round manifest.
    """

    groups_per_step: int
    max_staleness: int = 8
    upload_seconds: float = 5.0
    poll_seconds: float = 0.5


class Site:
    """One site of a run.

    Args:
        learner: takes the local steps; its present state is that of a new site.
    """

    def __init__(self, node: Node, learner: LocalLearner, settings: SiteSettings) -> None:
        self._node = node
        self._learner = learner
        self._settings = settings
        self._pool = GroupPool(node.run_id, settings.max_staleness)
        initial = learner.state()
        self._new_inner = without_masters(initial)
        shapes = {name: tensor.shape for name, tensor in masters(initial).items()}
        self._parts: tuple[Part, ...] = parts_of(shapes)
        self._record: SiteRecord | None = None
        self._opening: Signed[RoundManifest] | None = None  # opens the present round
        self._shared: SharedState | None = None  # with which it begins
        self._may_have_signed = True  # for the present round, with a state that was lost or set back since

    @property
    def shared(self) -> SharedState | None:
        """The shared state of the newest manifest that this site has applied; None before the first."""
        return self._shared

    async def run(self) -> None:
        """Take part in every round, for ever.

        Raises:
            ForkError: the trainer signed two histories in one epoch.
            StoreError, ProtocolError: this site's own state cannot be read or written.
        """
        await self._open()
        while True:
            await self._contribute()
            await self._settle(await self._closing_manifest())
            assert self._opening is not None
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
            self._shared = await round_files.get_state(self._node, opening.record, self._parts)
            self._record, self._opening = record, opening
            self._pool.use_up(used.group for used in record.used)
        await self._clean_up()

    async def _adopt_state(self, trusted: RoundManifest | None) -> None:
        """Fetch a whole state, as often as it takes. The error feedback begins with 0."""
        node = self._node
        reporter = ChangeReporter(node.telemetry, "state-unread")
        while True:
            try:
                opening, shared = await fetch_state(node, self._parts, trusted)
                used = await fetch_used_groups(node, opening.record, self._settings.max_staleness + 1)
            except ForkError:
                raise
            except (StoreError, TooLargeError, ProtocolError) as error:
                reporter.failure(error)
                await trio.sleep(self._settings.poll_seconds)
                continue
            break
        self._pool.use_up(item.group for item in used)
        if self._record is not None:
            known = {item.group for item in used}
            used += tuple(item for item in self._record.used if item.group not in known)
        inner = self._record.inner if self._record is not None else _NO_FILE
        await self._become(opening, shared, _NO_FILE, inner, used)
        await forget_downloads(node)
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
        await round_files.put_state(node.state, number, shared)
        await round_files.put_manifest(node.state, opening)
        recent = tuple(item for item in used if shared.step - item.step <= self._settings.max_staleness + 1)
        record = SiteRecord(number=number, trainer=opening.record.trainer, feedback=feedback, inner=inner, used=recent)
        await node.state.put(round_files.SITE, record.to_bytes())
        self._record, self._opening, self._shared = record, opening, shared

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

    async def _contribute(self) -> None:
        """Publish this site's contribution to the present round, if there is time and work for one."""
        assert self._opening is not None
        node, opening = self._node, self._opening.record
        if node.key.public not in opening.workers:
            return
        prepared = await self._prepared()
        if prepared is None and not (self._may_have_signed and await self._has_signed(opening.number + 1)):
            prepared = await self._prepare()
            self._may_have_signed = self._may_have_signed and prepared is None
        if prepared is None:
            node.telemetry.event("nothing-to-contribute", number=opening.number + 1)
            return
        record = prepared.record
        payload = await node.state.get(numbered(round_files.PAYLOAD, record.number), record.payload.size)
        await node.publish(paths.payload(node.key.public, record.payload.digest), payload)
        await node.publish(record.path, prepared.data)
        node.telemetry.event(
            "contributed",
            number=record.number,
            local_steps=record.local_steps,
            groups=len(record.groups),
            payload_bytes=record.payload.size,
            norm=record.norm,
        )

    async def _has_signed(self, number: int) -> bool:
        """Return whether storage has a contribution of this site to a round that its state does not know.

        If the store does not answer, it may have one.
        """
        try:
            await self._node.store.get(paths.contribution(self._node.key.public, number), 1, size=1)
        except NotFoundError:
            return False
        except StoreError as error:
            self._node.telemetry.event("contribution-unread", number=number, error=str(error))
        return True

    async def _prepared(self) -> Signed[RoundContribution] | None:
        """Return the contribution that this site has signed for the present round; None if it has not."""
        assert self._opening is not None
        node, number = self._node, self._opening.record.number + 1
        try:
            path = numbered(round_files.PREPARED, number)
            data = await node.state.get(path, RoundContribution.max_signed_bytes())
        except NotFoundError:
            return None
        signed = open_record(node, RoundContribution, paths.contribution(node.key.public, number), data)
        return signed if signed.record.opening == self._opening.digest else None

    async def _prepare(self) -> Signed[RoundContribution] | None:
        """Take the local steps and make a contribution of them durable; None if no step could be taken in time."""
        assert self._opening is not None and self._shared is not None and self._record is not None
        node, opening, shared, record = self._node, self._opening.record, self._shared, self._record
        number = opening.number + 1
        inner = self._new_inner
        if record.inner >= 0:
            inner = await round_files.get_tensors(node.state, numbered(round_files.INNER, record.inner))
        await node.run_sync(self._learner.restore, with_masters(inner, shared.weights))
        groups, steps = await self._local_steps(opening)
        if not steps:
            return None
        feedback = None
        if record.feedback >= 0 and opening.rules.uses_feedback(shared.step):
            feedback = await round_files.get_tensors(node.state, numbered(round_files.FEEDBACK, record.feedback))
        work: LocalWork = await node.run_sync(encode_work, shared, self._learner.state(), feedback, opening.rules)
        await node.state.put(numbered(round_files.PAYLOAD, number), work.payload)
        await round_files.put_tensors(node.state, numbered(round_files.FEEDBACK, number), work.feedback)
        await round_files.put_tensors(node.state, numbered(round_files.INNER, number), work.inner)
        contribution = RoundContribution(
            run=node.run_id,
            worker=node.key.public,
            number=number,
            opening=self._opening.digest,
            state=shared.digests,
            payload=ObjectRef(digest=content_digest(work.payload), size=len(work.payload)),
            groups=tuple(sorted(groups)),
            local_steps=steps,
            norm=work.norm,
            feedback=digest_weights(work.feedback) if work.feedback else b"",
            beacon_round=max(1, await node.time.wait_for_newest_round()),
        )
        data = sign(contribution, node.key)
        await node.state.put(numbered(round_files.PREPARED, number), data)
        return open_record(node, RoundContribution, contribution.path, data)

    async def _local_steps(self, opening: RoundManifest) -> tuple[list[bytes], int]:
        """Take the local steps of a round; return the digests of the groups and the number of steps."""
        node, settings, number = self._node, self._settings, opening.number + 1
        deadline = node.run.beacon.round_time(opening.closes) - settings.upload_seconds
        used, steps = list[bytes](), 0
        while steps < opening.rules.local_steps and node.time.now() < deadline:
            await self._pool.read_inbox(node.state, opening.version)
            digests = self._pool.dealt(number, opening.workers, node.key.public, used)[: settings.groups_per_step]
            if len(digests) < settings.groups_per_step:
                await trio.sleep(settings.poll_seconds)
                continue
            used += digests
            try:
                figures: StepFigures = await node.run_sync(self._learner.step, self._pool.groups(digests))
            except ValueError as error:
                node.telemetry.event("step-refused", error=str(error), groups=len(digests))
                continue
            steps += 1
            node.telemetry.event(
                "local-step",
                number=number,
                step=steps,
                loss=figures.loss,
                grad_norm=figures.grad_norm,
                reward=figures.mean_reward,
            )
        return used, steps

    # The end of a round

    async def _closing_manifest(self) -> Signed[RoundManifest] | None:
        """Wait for the manifest that closes the present round; None if a whole state must be fetched instead.

        Raises:
            ForkError: the trainer signed two histories in one epoch.
        """
        assert self._opening is not None
        node, opening = self._node, self._opening
        while True:
            try:
                signed = await fetch_manifest(node, opening.record.number + 1)
                check_next_manifest(opening, signed)
            except NotFoundError:
                if await self._is_behind():
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

    async def _is_behind(self) -> bool:
        """Return whether storage has a later state and not the manifests up to it."""
        assert self._opening is not None
        opening = self._opening.record
        if self._node.time.now() < self._node.run.beacon.round_time(opening.closes):
            return False
        try:
            return (await fetch_pointer(self._node)).state_number > opening.number
        except (StoreError, TooLargeError, ProtocolError):
            return False

    async def _settle(self, closing: Signed[RoundManifest] | None) -> None:
        """Apply the manifest that closes the present round, and begin the next one."""
        assert self._opening is not None and self._shared is not None and self._record is not None
        node, opening, record = self._node, self._opening.record, self._record
        prepared = await self._prepared()
        if closing is None:
            await self._adopt_state(opening)
            await self._clean_up()
            return
        manifest, own = closing.record, closing.record.counted_digest(node.key.public)
        shared = await self._applied(manifest, opening.rules)
        used = [UsedGroup(group=group, step=opening.state.step) for item in manifest.counted for group in item.groups]
        self._pool.use_up(item.group for item in used)
        if shared is None:
            await self._adopt_state(None)
            await self._clean_up()
            return
        feedback, inner = record.feedback, record.inner
        if own is not None and prepared is not None and prepared.digest == own:
            inner = manifest.number
            feedback = manifest.number if opening.rules.uses_feedback(opening.state.step) else feedback
        elif own is not None:  # this state was lost or set back since then, so its feedback is not the counted one's
            feedback = _NO_FILE
            node.telemetry.event("contribution-unknown", number=manifest.number)
        await self._become(closing, shared, feedback, inner, (*record.used, *used))
        await self._clean_up()
        self._report(manifest, opening)

    async def _applied(self, manifest: RoundManifest, rules: RoundRules) -> SharedState | None:
        """Return the state after a round; None if this site computes another one than the manifest gives."""
        assert self._shared is not None
        node = self._node
        while True:
            try:
                payloads = await fetch_payloads(node, manifest.trainer, manifest.counted)
                factors = [item.factor for item in manifest.counted]
                shared: SharedState = await node.run_sync(self._shared.after, payloads, factors, rules)
            except StoreError as error:
                node.telemetry.event("payload-unread", number=manifest.number, error=str(error))
                await trio.sleep(self._settings.poll_seconds)
                continue
            except ProtocolError as error:
                node.telemetry.event("round-not-applied", number=manifest.number, error=str(error))
                return None
            shared = shared.with_momentum(manifest.rules)
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
            groups = self._pool.dealt(manifest.number, opening.workers, refusal.worker)
            node.telemetry.event(
                "site-refused",
                number=manifest.number,
                worker=refusal.worker.hex()[:16],
                reason=refusal.reason,
                groups=len(groups),  # which are dealt again
            )
