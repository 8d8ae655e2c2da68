"""Re-audit: after a rejection, judge the groups of the miner's earlier windows that were dealt to this validator and
that it had not audited.

Groups that can still be fetched are judged by the rules of their window, together with the judgements of that time.
Groups that can no longer be fetched lose the credit that they had without an audit.
"""

from collections.abc import Callable

from protocol import limits, paths
from protocol.errors import ProtocolError
from protocol.identity.signing import Signed, sign
from protocol.judging.evidence import NO_EVIDENCE
from protocol.judging.ledger import Amendment, LedgerRow, Summary
from protocol.judging.verdict import Reason, ReauditVerdict, Verdict, joint_rejection
from protocol.rollout.batch import Commitment
from roles.node.identity import Node
from roles.policy.assignment import Task
from roles.policy.follower import Follower
from roles.policy.serving import serve
from roles.ports import Engine, StoreError
from roles.records import P, fetch_record
from roles.validator.audit import Auditor, reject_accepted
from roles.validator.judge import Judge
from roles.validator.ledger_state import Ledger
from roles.validator.window_cases import Case

_AMENDED = {"verdict", "accepted", "rejected"}  # what an amendment has of a row
MAX_AGE_WINDOWS = 16  # older windows are not judged again; their unaudited groups lose their credit


class Reaudit:
    """Judges unaudited groups of miners that were rejected later.

    No result is published before the window of the rejection can no longer be sealed: it would tell other validators
    what to seal. And nothing is judged while a window waits, which has a deadline. The pending rows follow from the
    ledger, so a restart forgets nothing.
    """

    def __init__(self, node: Node, follower: Follower, engine: Engine, task: Task, ledger: Ledger) -> None:
        self._node = node
        self._follower = follower
        self._engine = engine
        self._task = task
        self._ledger = ledger
        self._amendments: dict[tuple[int, bytes], Amendment] = {}  # by window and miner; in no summary yet

    def take_amendments(self) -> tuple[Amendment, ...]:
        """Remove and return the amendments that are in no summary yet, as many as one summary holds."""
        keys = [*self._amendments][: limits.MAX_WINDOW_MINERS]
        return tuple(self._amendments.pop(key) for key in keys)

    async def run_while_idle(self, is_busy: Callable[[], bool]) -> None:
        """Amend every row with unaudited credit of miners that were rejected later, and publish the new verdicts. Rows
        are left for the next call as soon as something more urgent waits.
        """
        entry: Summary | None = None
        for window, miner in self._ledger.accounts.unaudited(await self._newest_sealed_window()):
            if (window, miner) in self._amendments:
                continue
            if is_busy():
                return
            verdict = None
            if window > self._ledger.newest - MAX_AGE_WINDOWS:
                if entry is None or entry.window != window:
                    entry = await self._ledger.entry(window)
                try:
                    verdict = await self._judge(entry, next(row for row in entry.rows if row.miner == miner))
                except (StoreError, ProtocolError) as error:
                    self._node.telemetry.event("reaudit-failed", window=window, miner=miner.hex(), error=str(error))
            result = {} if verdict is None else LedgerRow.of(verdict).model_dump(include=_AMENDED)
            self._amendments[window, miner] = Amendment(window=window, miner=miner, **result)

    async def _newest_sealed_window(self) -> int:
        """Return the newest window of the ledger for which no seal counts any more; -1 for none."""
        for window in reversed(self._ledger.windows):
            if await self._node.time.has_come(self._node.run.schedule.seal(window)):
                return window
        return -1

    async def _judge(self, entry: Summary, row: LedgerRow) -> Verdict:
        """Judge the groups of a row that were not audited, publish the verdict, and return it."""
        node, schedule, window = self._node, self._node.run.schedule, entry.window
        path = paths.verdict(node.key.public, window, row.miner)  # of this validator's own verdict of the window
        first_verdict = (await self._fetch(Verdict, path, row.verdict, "not the verdict that the ledger names")).record
        path = paths.commitment(row.miner, window)
        error = "not the commitment that was judged"
        commitment = await self._fetch(Commitment, path, first_verdict.commitment, error)
        await serve(node, self._engine, await self._follower.rebuild(first_verdict.version))
        opening = await node.randomness(schedule.opening(window))
        draw = await node.randomness(schedule.audit(window))
        judge = Judge(self._task, self._engine, window, opening, self._follower.shares, draw)
        auditor = Auditor(node, judge, entry.dealing, draw, {})
        audited = {judgement.index for judgement in first_verdict.judgements}
        case = Case(commitment, row.pledged, first_verdict.seen_ms / 1000)
        unaudited = [index for index in auditor.picked_groups(case) if index not in audited]
        all_judgements, _ = await auditor.judge_groups(commitment.record, unaudited)
        judgements = [judgement for judgement in all_judgements if judgement.reason != Reason.MISSING]
        if not judgements:
            raise StoreError(f"{commitment.record.miner.hex()}: none of its groups of window {window} is in storage")
        # Of another arithmetic of this validator, the misses of that time were counted by other thresholds.
        comparable = first_verdict.judgements if first_verdict.validator_arithmetic == judge.arithmetic else ()
        refusal = joint_rejection([*comparable, *judgements], NO_EVIDENCE, auditor.thresholds(commitment.record))
        verdict = ReauditVerdict(**dict(auditor.make_verdict(case, row.dealt, reject_accepted(judgements, refusal))))
        await node.publish(verdict.path, sign(verdict, node.key))
        return verdict

    async def _fetch(self, record_type: type[P], path: str, digest: bytes, error: str) -> Signed[P]:
        signed = await fetch_record(self._node, record_type, path)
        if signed.digest != digest:
            raise ProtocolError(error, path)
        return signed
