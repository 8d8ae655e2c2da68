"""Hands accepted groups over to the learner: fetches them, checks the digest that the verdicts name, and logs what
became of every judged group of every miner's window in the outcome log, which is durable and append-only.
"""

from collections.abc import Awaitable, Callable, Sequence, Set
from contextlib import suppress
from dataclasses import replace

from protocol import paths
from protocol.errors import LimitError, ProtocolError
from protocol.identity.signing import Signed
from protocol.rollout.batch import Commitment, open_group
from roles.node.identity import Node
from roles.ports import LineReporter, NotFoundError, ObjectStore, StoreError
from roles.records import FOREIGN, fetch_record
from roles.trainer.collect.logprob_bias import LOGPROB_BIAS
from roles.trainer.collect.quorum import Decision
from roles.trainer.collect.validator_monitor import DISTRUSTED
from roles.trainer.spool import ACKNOWLEDGED, COLLECTOR_PROGRESS, INBOX, INTENTS, OUTCOMES
from roles.trainer.verified_batch import (
    CANARY,
    USED,
    CollectorProgress,
    GroupOutcome,
    Intent,
    VerifiedBatch,
    VerifiedGroup,
    WindowOutcomes,
    verified_group,
)

_COMMITMENT_CHANGED = "commitment-changed"
_VERDICT_MISMATCH = "verdict-does-not-fit"
_GROUP_MISSING = "missing-after-verdict"
_GROUP_CHANGED = "changed-after-verdict"
_RETRIABLE = {_COMMITMENT_CHANGED, _GROUP_MISSING, _GROUP_CHANGED}
"""Statuses that come from one read of storage, and that the next read may not confirm."""


def object_name(window: int, miner: bytes) -> str:
    """Return the name of an object that exists once for a miner's window."""
    return f"{window:010d}-{miner.hex()}"


class OutcomeLog:
    """A trainer's outcome log. Memory holds of which miners there are entries."""

    def __init__(self, state: ObjectStore) -> None:
        self._state = state
        self._windows: dict[int, set[bytes]] = {}
        self.oldest_window: int | None = None
        """The oldest window for which verdicts may still come; None before the first start."""

    async def open(self) -> None:
        """Read which windows and miners have entries, and how far the collector has come."""
        with suppress(NotFoundError):
            data = await self._state.get(COLLECTOR_PROGRESS, CollectorProgress.max_bytes)
            self.oldest_window = CollectorProgress.from_bytes(data).oldest_window
        async for item in self._state.list(OUTCOMES):
            path = item.path.removeprefix(OUTCOMES)
            self._windows.setdefault(paths.window_of(path), set()).add(paths.key_at_end(path))

    def has_entries(self, window: int, miner: bytes) -> bool:
        """Whether something was logged for a miner's window, be it an empty list."""
        return miner in self._windows.get(window, ())

    async def outcomes(self, window: int, miner: bytes) -> tuple[GroupOutcome, ...]:
        """Return what is logged for a miner's window; nothing if there are no entries."""
        if not self.has_entries(window, miner):
            return ()
        data = await self._state.get(OUTCOMES + object_name(window, miner), WindowOutcomes.max_bytes)
        return WindowOutcomes.from_bytes(data).outcomes

    async def append(self, window: int, miner: bytes, outcomes: Sequence[GroupOutcome]) -> None:
        """Log what became of more groups of a miner's window."""
        record = WindowOutcomes(window=window, miner=miner, outcomes=(*await self.outcomes(window, miner), *outcomes))
        await self._state.put(OUTCOMES + object_name(window, miner), record.to_bytes())
        self._windows.setdefault(window, set()).add(miner)

    async def advance(self, oldest_window: int) -> None:
        """Remember the oldest window for which verdicts may still come."""
        self.oldest_window = oldest_window
        await self._state.put(COLLECTOR_PROGRESS, CollectorProgress(oldest_window=oldest_window).to_bytes())

    async def delete_before(self, window: int) -> None:
        """Delete the entries of all windows before one."""
        for old_window in [number for number in self._windows if number < window]:
            for miner in self._windows.pop(old_window):
                await self._state.delete(OUTCOMES + object_name(old_window, miner))


class Acceptance:
    """Carries out the decisions on miners' windows; groups of canaries are never trained on."""

    def __init__(self, node: Node, outcome_log: OutcomeLog, canaries: Set[bytes]) -> None:
        self._node = node
        self._outcome_log = outcome_log
        self._canaries = canaries

    async def open(self) -> None:
        """Carry out what was decided before a restart."""
        intent_paths = [item.path async for item in self._node.state.list(INTENTS)]
        for path in intent_paths:
            await self._carry_out(Intent.from_bytes(await self._node.state.get(path, Intent.max_bytes)))

    async def accept(
        self,
        window: int,
        miner: bytes,
        decisions: Sequence[Decision],
        *,
        final_attempt: bool,
        timed_out: Callable[[], Awaitable[bool]],
    ) -> bool:
        """Fetch the accepted groups of a miner's window, hand them over, and log what became of every decided group.

        The result is durable as an intent before inbox or outcome log are written, so neither a crash nor a full disk
        can make the two disagree. It returns whether the miner's storage was asked and answered. In the final attempt
        what storage shows counts, even if groups are missing or not those promised.
        """
        if miner in self._canaries:
            decisions = [replace(decision, reason=CANARY) for decision in decisions]
        logged_outcomes = await self._outcome_log.outcomes(window, miner)
        used_commitments = {outcome.commitment for outcome in logged_outcomes if outcome.status == USED}
        decisions = [
            replace(decision, reason=_COMMITMENT_CHANGED)
            if not decision.reason and used_commitments - {decision.group[0]}
            else decision
            for decision in decisions
        ]
        accepted_decisions = [decision for decision in decisions if not decision.reason]
        storage_answered = bool(accepted_decisions)
        results: Sequence[VerifiedGroup | str]
        try:
            commitment = await self._commitment(window, miner) if accepted_decisions else None
            results = [await self._fetch(commitment, decision) for decision in accepted_decisions]
            retriable = {reason for reason in results if isinstance(reason, str)} & _RETRIABLE
            if retriable and not final_attempt:
                raise StoreError(
                    f"window {window} of {miner.hex()[:8]}: {', '.join(sorted(retriable))}, as storage shows it now"
                )
        except StoreError as error:
            if not await timed_out():
                raise
            self._node.telemetry.event("collect-failed", window=window, miner=miner.hex()[:8], error=str(error))
            results, storage_answered = ["unreachable"] * len(accepted_decisions), False
        groups = tuple(result for result in results if isinstance(result, VerifiedGroup))
        outcomes = [decision.outcome(decision.reason) for decision in decisions if decision.reason]
        for decision, result in zip(accepted_decisions, results, strict=True):
            outcomes.append(decision.outcome(USED if isinstance(result, VerifiedGroup) else result))
        intent = Intent(
            window=window,
            miner=miner,
            previous_outcomes=len(logged_outcomes),
            batch=VerifiedBatch(window=window, miner=miner, groups=groups) if groups else None,
            outcomes=tuple(outcomes),
        )
        await self._carry_out(await self._record(intent))
        return storage_answered

    async def _record(self, intent: Intent) -> Intent:
        """Make an intent durable, and return it; without its groups if they are larger than a batch may be."""
        try:
            if intent.batch is not None:
                intent.batch.to_bytes()
                await self._node.state.put(_intent_path(intent), intent.to_bytes())
        except LimitError:
            outcomes = [
                item.model_copy(update={"status": "too-large"}) if item.status == USED else item
                for item in intent.outcomes
            ]
            return intent.model_copy(update={"batch": None, "outcomes": tuple(outcomes)})
        return intent

    async def _carry_out(self, intent: Intent) -> None:
        """Write inbox and outcome log as an intent says. Doing it twice has the effect of doing it once."""
        node, name = self._node, object_name(intent.window, intent.miner)
        if len(await self._outcome_log.outcomes(intent.window, intent.miner)) == intent.previous_outcomes:
            if intent.batch is not None:
                # the learner may not have read an earlier batch yet, so a later one has a path of its own
                suffix = f"-{intent.previous_outcomes}" if intent.previous_outcomes else ""
                await node.state.put(INBOX + name + suffix, intent.batch.to_bytes())
            await self._outcome_log.append(intent.window, intent.miner, intent.outcomes)
            used_groups = len(intent.batch.groups) if intent.batch else 0
            node.telemetry.event(
                "collected",
                window=intent.window,
                miner=intent.miner.hex()[:8],
                used=used_groups,
                unused=len(intent.outcomes) - used_groups,
            )
        if intent.batch is not None:
            await node.state.delete(_intent_path(intent))

    async def _commitment(self, window: int, miner: bytes) -> Signed[Commitment] | None:
        """Return the miner's commitment as storage shows it now; None if it shows none."""
        path = paths.commitment(miner, window)
        try:
            return await fetch_record(self._node, Commitment, path)
        except FOREIGN as error:
            self._node.telemetry.event("commitment-refused", path=path, error=str(error))
            return None

    async def _fetch(self, commitment: Signed[Commitment] | None, decision: Decision) -> VerifiedGroup | str:
        """Return an accepted group, whose bytes have the digest that the verdicts name, or why it is not used."""
        promised_by, index, digest = decision.group
        if commitment is None or commitment.digest != promised_by:
            return _COMMITMENT_CHANGED
        record = commitment.record
        if index >= len(record.groups) or digest != record.groups[index][0]:
            return _VERDICT_MISMATCH  # the verdict names a group that the miner never promised
        path = paths.batch(record.miner, record.window, record.batch)
        offset, size = record.extent(index)
        try:
            frame = await self._node.store.get(path, size, offset=offset, size=size)
            group = open_group(frame, record, index, self._node.run.group_bytes)
        except NotFoundError:
            return _GROUP_MISSING
        except ProtocolError:
            return _GROUP_CHANGED
        exact = self._node.run.exact_rewards
        judgements = tuple(opinion.judgement for opinion in decision.accepting)
        return verified_group(group, digest, judgements, exact=exact) or _VERDICT_MISMATCH


def _intent_path(intent: Intent) -> str:
    return INTENTS + object_name(intent.window, intent.miner)


async def repair_collector(state: ObjectStore, lost_paths: Set[str], say: LineReporter) -> None:
    """Repair the collector's part of the state of a trainer or a site, of which these objects were lost.

    A window whose outcome log is lost would be read again, and its groups handed over a second time. So it is closed,
    and all windows before it, because only one number says where the collector goes on. Groups of these windows that
    were not handed over yet are lost. Validators stay distrusted.
    """
    for path in sorted(lost_paths):
        if path.startswith(INBOX):
            say(f"{path}: its groups are not trained on")
        elif path == ACKNOWLEDGED:
            say(f"{path}: groups that the training has learned from may come again if they are in the inbox")
        elif path.startswith(DISTRUSTED):
            await state.put(path, b"")
            say(f"{path}: stays distrusted; the verdict that shows why is in storage")
        elif path == LOGPROB_BIAS:
            say(f"{path}: log-probabilities that differ to one side are counted anew")
    # Windows before `oldest` are closed already; what is lost of them changes nothing.
    try:
        data = await state.get(COLLECTOR_PROGRESS, CollectorProgress.max_bytes)
        oldest = CollectorProgress.from_bytes(data).oldest_window
    except NotFoundError:
        oldest = 0
    # Without its outcome log it is not known which groups of a window were handed over; without its write-ahead log,
    # whether the last ones have reached the inbox. If the progress itself is lost, verdicts may have been read for all
    # windows that have an outcome log, so the collector goes on after the newest of these.
    doubtful = [path for path in lost_paths if path.startswith((OUTCOMES, INTENTS))]
    if COLLECTOR_PROGRESS in lost_paths:
        doubtful += [item.path async for item in state.list(OUTCOMES)]
    windows = [window for path in doubtful if (window := paths.window_of(path)) >= oldest]
    if not windows:
        if COLLECTOR_PROGRESS in lost_paths:
            say(f"{COLLECTOR_PROGRESS}: nothing was collected; it begins with the windows that are open")
        return
    first = max(windows) + 1
    await state.put(COLLECTOR_PROGRESS, CollectorProgress(oldest_window=first).to_bytes())
    say(f"{COLLECTOR_PROGRESS}: verdicts count from window {first} on, so that no group is trained on twice")
