"""The validator: in every window, note what is pledged and committed to in time, judge what the second round picks, and
publish.

Watching and judging are two tasks. A pledge counts only if it was seen before the window opened, and a commitment only
if it was seen before the second round was out, so watching never waits for judging; judging may fall behind, up to the
round after which nobody waits for a verdict. Findings are sealed first and revealed later (roles/validator/reveal.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

import trio

from protocol.errors import ProtocolError
from protocol.judging.ledger import Evaluation, LedgerRow, Summary
from protocol.judging.verdict import Verdict
from roles.node.identity import Node
from roles.policy.assignment import Task
from roles.policy.follower import Follower, VerifiedWeights
from roles.policy.serving import keep_fresh, serve
from roles.ports import BeaconError, Engine, EngineError, StoreError
from roles.validator.audit import Auditor
from roles.validator.case_queue import CaseQueue
from roles.validator.judge import Judge
from roles.validator.judging_scheduler import JudgingScheduler
from roles.validator.ledger_state import Ledger
from roles.validator.reaudit import Reaudit
from roles.validator.reveal import Revealer
from roles.validator.window_cases import Pledges, WindowCases, docket

ANNOUNCED_SECONDS = 600.0
_SEALING = 0.2  # of the time between the second round and the last one for seals: for sealing
_BACKLOG_WINDOWS = 64  # windows seen and not judged yet
_REMEMBERED_WORKS = 100_000  # work digests of accepted groups, to name copies


@dataclass(frozen=True)
class ValidatorSettings:
    """What a validator's operator decides.

    Attributes:
        evaluation_problems: held-out problems solved greedily for every version that serves a window; 0 for none.
        poll_seconds: how often to look for a newer version.
    """

    evaluation_problems: int
    poll_seconds: float


class Validator:
    """One validator of a run."""

    def __init__(
        self, node: Node, follower: Follower, engine: Engine, task: Task, ledger: Ledger, settings: ValidatorSettings
    ) -> None:
        self._node = node
        self._follower = follower
        self._engine = engine
        self._task = task
        self._ledger = ledger
        self._settings = settings
        self._works: dict[bytes, bytes] = {}
        self._evaluation: Evaluation | None = None
        self._pledges = Pledges(node)
        self._revealer = Revealer(node, ledger)
        self._look_back = Reaudit(node, follower, engine, task, ledger)

    async def run(self) -> None:
        """Validate window after window, for ever."""
        node = self._node
        seen, to_judge = trio.open_memory_channel[WindowCases](_BACKLOG_WINDOWS)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.keep_announced, "validator", ANNOUNCED_SECONDS)
            nursery.start_soon(keep_fresh, node, self._follower, self._settings.poll_seconds)
            nursery.start_soon(self._revealer.run)
            nursery.start_soon(self._watch, seen)
            async for found in to_judge:
                idle = not to_judge.statistics().current_buffer_used
                await self._window(found, evaluate=idle)
                await self._second_looks(lambda: bool(to_judge.statistics().current_buffer_used))

    async def _watch(self, seen: "trio.MemorySendChannel[WindowCases]") -> None:
        """Note every window's pledges and commitments in time; whoever was not looking then abstains."""
        node, schedule = self._node, self._node.run.schedule
        ahead = max(1, schedule.rounds - schedule.audit_rounds) * node.run.beacon.period_ms / 1000
        watched = self._ledger.newest
        if watched >= 0:
            node.time.note(schedule.audit(watched))  # its randomness was used: no clock can take that back
        while True:
            window = await node.next_window(watched, ahead)
            try:
                pledged = await self._pledges.take()
                if node.time.now() >= node.run.opening_time(window):
                    raise StoreError("pledges came after the window had opened")
                await node.randomness(schedule.opening(window))
                watched = window
                await node.time.come(schedule.deadline(window))
                seen.send_nowait(await self._docket(window, pledged))
            except BeaconError as error:  # it has not opened yet, whatever the clock said
                node.telemetry.event("window-missed", window=window, error=str(error))
            except (StoreError, trio.WouldBlock) as error:
                watched = window
                node.telemetry.event("window-missed", window=window, error=str(error) or "too far behind")

    async def _docket(self, window: int, pledged: dict[bytes, int]) -> WindowCases:
        """The window's docket without the commitments that were seen too late to count, which are not held against
        anybody.
        """
        found = await docket(self._node, window, pledged)
        draw_due = self._node.run.beacon.due(self._node.run.schedule.audit(window))
        for miner in found.undelivered:
            self._pledges.broken_by(miner)
        return WindowCases(window, tuple(case for case in found.cases if case.seen < draw_due), found.undelivered)

    async def _window(self, found: WindowCases, evaluate: bool) -> None:
        node, schedule, window = self._node, self._node.run.schedule, found.window
        try:
            if window <= self._ledger.newest:
                node.telemetry.event("window-abandoned", window=window, error="it is in the ledger already")
                return
            if await node.time.has_come(schedule.verdict(window)):
                node.telemetry.event("window-abandoned", window=window, error="nobody waits for its verdicts any more")
                return
            weights = await self._follower.hold(self._follower.version_for(window))
            opening = await node.randomness(schedule.opening(window))
            draw = await node.randomness(schedule.audit(window))
            began = trio.current_time()
            verdicts = await self._judge(found, weights.version, opening, draw)
            seconds = trio.current_time() - began
            if evaluate:
                with trio.move_on_after(self._left(window)):
                    await self._evaluate(weights)
            await self._enter(found, weights, verdicts, seconds)
        except (StoreError, BeaconError, ProtocolError, EngineError) as error:
            node.telemetry.event("window-abandoned", window=window, error=str(error))

    async def _second_looks(self, busy: Callable[[], bool]) -> None:
        try:
            await self._look_back.until(busy)
        except (BeaconError, EngineError) as error:
            self._node.telemetry.event("look-back-failed", error=str(error))

    async def _judge(self, found: WindowCases, version: int, opening: bytes, draw: bytes) -> list[Verdict]:
        """The verdict on every case that there is time for."""
        node = self._node
        auditor = Auditor(node, Judge(self._task, self._engine, found.window, opening), draw, self._works)
        turns = CaseQueue(node, self._ledger, draw)
        sitting = JudgingScheduler(node, self._follower, self._engine, auditor, turns, found.window, version)
        judged = await sitting.judge(found.cases, self._left(found.window))
        verdicts = [auditor.name_copies(verdict, strange) for verdict, strange in judged]
        self._forget_old_works()
        for verdict in verdicts:
            self._tell(verdict)
        return verdicts

    def _left(self, window: int) -> float:
        """Seconds until what was found must be sealed; where that is too late, until nobody waits for the verdicts any
        more.
        """
        node, schedule = self._node, self._node.run.schedule
        seal, now = node.run.beacon.due(schedule.seal(window)), node.time.now()
        sealing = seal - _SEALING * (seal - node.run.beacon.due(schedule.audit(window)))
        return max(0.0, (sealing if now < sealing else node.run.beacon.due(schedule.verdict(window))) - now)

    def _forget_old_works(self) -> None:
        excess = len(self._works) - _REMEMBERED_WORKS
        for work in list(self._works)[: max(0, excess)]:
            del self._works[work]

    async def _evaluate(self, weights: VerifiedWeights) -> None:
        """Greedy decoding of the held-out problems, once for each version."""
        count = self._settings.evaluation_problems
        if count == 0 or (self._evaluation is not None and self._evaluation.version == weights.version):
            return
        task = self._task
        count = min(count, task.environment.held_out_size or count)
        problems = [task.environment.held_out(index) for index in range(count)]
        prompts = [task.tokenizer.encode(problem.prompt) for problem in problems]
        await serve(self._node, self._engine, weights)
        completions = await self._engine.greedy(prompts, task.run.sampling.params())
        solved = sum(reward >= 1.0 for reward in await task.rewards_of(list(zip(problems, completions, strict=True))))
        self._evaluation = Evaluation(version=weights.version, problems=count, solved=solved)

    async def _enter(
        self, found: WindowCases, weights: VerifiedWeights, verdicts: list[Verdict], seconds: float
    ) -> None:
        """Enter the window into the ledger, and promise what it says.

        Raises:
            StoreError: this node's own state cannot be written.
        """
        node, evaluation = self._node, self._evaluation
        rows = [LedgerRow.of(verdict) for verdict in verdicts]
        rows += [LedgerRow.undelivered(miner, pledged) for miner, pledged in found.undelivered.items()]
        summary = Summary(
            run=node.run_id,
            window=found.window,
            version=weights.version,
            validator=node.key.public,
            previous=self._ledger.tip,
            salt=node.key.derive("salt", found.window)[:16],
            weights=weights.digest,
            rows=tuple(sorted(rows, key=lambda row: row.miner)),
            amendments=self._look_back.take(),
            scores=(),
            evaluation=evaluation if evaluation and evaluation.version == weights.version else None,
            verified_tokens=sum(judgement.tokens for verdict in verdicts for judgement in verdict.judgements),
            verify_ms=round(seconds * 1000),
            alarms=node.alarms.drain(),
        )
        await self._revealer.prepare(found.window, verdicts)
        await self._revealer.promise(await self._ledger.record(summary))

    def _tell(self, verdict: Verdict) -> None:
        accepted = sum(judgement.accepted for judgement in verdict.judgements)
        self._node.telemetry.event(
            "verdict",
            window=verdict.window,
            miner=verdict.miner.hex()[:8],
            accepted=accepted,
            rejected=len(verdict.judgements) - accepted,
            reasons=",".join(sorted({judgement.reason for judgement in verdict.judgements if judgement.reason})),
        )
