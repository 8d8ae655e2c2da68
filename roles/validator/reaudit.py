"""After a rejection: a second look at the miner's earlier windows, at the groups that nobody had audited then.

What can still be had is judged by the rules of its window, together with what was judged then; what cannot loses the
credit that it had on trust.
"""

from collections.abc import Callable

from protocol import limits, paths
from protocol.errors import ProtocolError
from protocol.identity.signing import Signed, open_signed, sign
from protocol.judging.ledger import Amendment, LedgerRow
from protocol.judging.verdict import ReauditVerdict, Verdict, refused_together
from protocol.rollout.batch import Commitment
from roles.node.identity import Node
from roles.policy.assignment import Task
from roles.policy.follower import Follower
from roles.policy.serving import serve
from roles.ports import Engine, StoreError
from roles.validator.audit import Auditor, refused, verdict_on
from roles.validator.judge import Judge
from roles.validator.ledger_state import Ledger
from roles.validator.window_cases import Case

WINDOWS = 16  # looked back at, at most


class Reaudit:
    """Judges what was not audited, of miners that turned out to be false.

    Nothing of it is published before the seals of the window in which they did have come, which would tell others what
    to seal; and it waits while a window is to be judged, which has a deadline. Whom to look back at follows from the
    ledger, so a restart forgets nothing.
    """

    def __init__(self, node: Node, follower: Follower, engine: Engine, task: Task, ledger: Ledger) -> None:
        self._node = node
        self._follower = follower
        self._engine = engine
        self._task = task
        self._ledger = ledger
        self._found: dict[tuple[int, bytes], Amendment] = {}

    def take(self) -> tuple[Amendment, ...]:
        """What was found and is in no summary yet, as much as one summary holds."""
        entered = [*self._found][: limits.MAX_PARTICIPANTS]
        return tuple(self._found.pop(key) for key in entered)

    async def until(self, busy: Callable[[], bool]) -> None:
        """Amend every kept row that counts on trust, of miners that were rejected later; each with its verdict
        published.

        Args:
            busy: whether there is something more urgent to do; the rest comes another time.

        Raises:
            EngineError: the engine broke.
            BeaconError: no time is known.
        """
        for window, row in await self._due():
            if busy():
                return
            verdict = None
            if window > self._ledger.newest - WINDOWS:
                try:
                    verdict = await self._judge(window, row)
                except (StoreError, ProtocolError) as error:
                    self._node.telemetry.event(
                        "look-back-failed", window=window, miner=row.miner.hex(), error=str(error)
                    )
            self._found[window, row.miner] = _amendment(window, row, verdict)

    async def _due(self) -> list[tuple[int, LedgerRow]]:
        sealed = await self._newest_sealed()
        return [
            (window, row)
            for miner, rejected in self._ledger.rejections(sealed).items()
            for window, row in self._ledger.unaudited(miner)
            if window < rejected and (window, miner) not in self._found
        ]

    async def _newest_sealed(self) -> int:
        """The newest window at hand of which no seal is taken any more; -1 for none."""
        for entry in reversed(self._ledger.entries()):
            if await self._node.time.has_come(self._node.run.schedule.seal(entry.window)):
                return entry.window
        return -1

    async def _judge(self, window: int, row: LedgerRow) -> Verdict:
        """The verdict on the groups that were left out.

        Raises:
            StoreError, ProtocolError: bytes or weights cannot be had any more, or are not those judged then.
            EngineError: the engine broke.
        """
        node, schedule = self._node, self._node.run.schedule
        before = await self._earlier(window, row)
        commitment = await self._commitment(before)
        await serve(node, self._engine, await self._follower.hold(before.version))
        judge = Judge(self._task, self._engine, window, await node.randomness(schedule.opening(window)))
        draw = await node.randomness(schedule.audit(window))
        auditor = Auditor(node, judge, draw, {})
        done = {judgement.index for judgement in before.judgements}
        rest = [index for index in range(row.submitted) if index not in done]
        judgements, _ = await auditor.judge_groups(commitment.record, rest)
        refusal = refused_together([*before.judgements, *judgements], (), node.run.proof)
        verdict = verdict_on(node, Case(commitment, row.pledged, before.seen_ms / 1000), refused(judgements, refusal))
        reaudit = ReauditVerdict(**dict(verdict))
        await node.publish(reaudit.path, sign(reaudit, node.key))
        return reaudit

    async def _earlier(self, window: int, row: LedgerRow) -> Verdict:
        """This validator's own verdict of then, as storage still has it."""
        own = self._node.key.public
        path = paths.verdict(own, window, row.miner)
        data = await self._node.store.get(path, limits.MAX_VERDICT_BYTES + limits.MAX_ENVELOPE_BYTES)
        signed = open_signed(data, Verdict, [own])
        if signed.digest != row.verdict:
            raise ProtocolError("not the verdict that the ledger names", path)
        return signed.record

    async def _commitment(self, verdict: Verdict) -> Signed[Commitment]:
        path = paths.commitment(verdict.miner, verdict.window)
        data = await self._node.store.get(path, limits.MAX_COMMITMENT_BYTES + limits.MAX_ENVELOPE_BYTES)
        signed = open_signed(data, Commitment, [verdict.miner])
        if signed.digest != verdict.commitment:
            raise ProtocolError("not the commitment that was judged", path)
        return signed


def _amendment(window: int, row: LedgerRow, verdict: Verdict | None) -> Amendment:
    accepted = sum(judgement.accepted for judgement in verdict.judgements) if verdict else 0
    return Amendment(
        window=window,
        miner=row.miner,
        verdict=LedgerRow.of(verdict).verdict if verdict else b"",
        accepted=accepted,
        rejected=len(verdict.judgements) - accepted if verdict else 0,
    )
