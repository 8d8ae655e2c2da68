"""The validator: in every window, read pledges and commitments in time, judge the groups that the second round picks,
and publish the verdicts.

Reading and judging are two tasks. A pledge counts only if it was read before the window opened, and a commitment only
if it was read before the second round was out, so reading never waits for judging. Judging may fall behind, up to the
round after which nobody waits for a verdict. Results are sealed first and revealed later (roles/validator/reveal.py).
"""

from contextlib import suppress
from functools import partial

import trio

from protocol import limits
from protocol.difficulty import Counts
from protocol.environments.base import SandboxLimitError
from protocol.errors import GapError, ProtocolError
from protocol.judging.ledger import Evaluation, LedgerRow, Summary, accepted_groups
from protocol.judging.roster import Roster
from protocol.judging.verdict import Reason, Verdict
from roles.node.identity import Node
from roles.policy.assignment import Task
from roles.policy.difficulty_tables import watch_tables
from roles.policy.follower import Follower
from roles.policy.serving import keep_fresh, serve
from roles.policy.verified_weights import VerifiedWeights
from roles.ports import BeaconError, Engine, EngineError, StoreError
from roles.rosters import Rosters
from roles.validator.audit import Auditor
from roles.validator.evaluation import evaluate
from roles.validator.judge import Judge
from roles.validator.judging_scheduler import CaseQueue, JudgingScheduler
from roles.validator.ledger_state import Ledger
from roles.validator.reaudit import Reaudit
from roles.validator.reveal import Revealer
from roles.validator.validator_settings import ValidatorSettings
from roles.validator.window_cases import Pledge, Pledges, ServingVersions, WindowCases, read_window_cases

ANNOUNCEMENT_SECONDS = 600.0
_SEALING = 0.2  # for sealing: a share of the time between the second round and the last one for seals
_BACKLOG_WINDOWS = 64  # windows that were read and not judged yet
_MAX_ACCEPTED_WORK = 16 * limits.MAX_WINDOW_MINERS  # work digests of accepted groups, to name copies


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
        self._accepted_work: dict[bytes, bytes] = {}  # work digest -> miner
        self._evaluation: Evaluation | None = None
        self._evaluated_version = -1  # the newest one that was tried
        self._pledges = Pledges(node)
        self._rosters = Rosters(node)
        self._revealer = Revealer(node, ledger)
        self._reaudit = Reaudit(node, follower, engine, task, ledger)

    async def run(self) -> None:
        """Validate window after window, for ever."""
        node = self._node
        send_cases, receive_cases = trio.open_memory_channel[WindowCases](_BACKLOG_WINDOWS)

        def is_busy() -> bool:
            return bool(receive_cases.statistics().current_buffer_used)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.keep_announced, "validator", ANNOUNCEMENT_SECONDS)
            nursery.start_soon(keep_fresh, node, self._follower, self._settings.poll_seconds)
            nursery.start_soon(self._revealer.run)
            pause = partial(trio.sleep, node.pace(self._settings.poll_seconds))
            nursery.start_soon(watch_tables, node, self._follower, pause)
            nursery.start_soon(self._read_windows, send_cases, nursery)
            async for cases in receive_cases:
                await self._process_window(cases, evaluate=not is_busy())
                try:
                    await self._reaudit.run_while_idle(is_busy)
                except (BeaconError, EngineError) as error:
                    node.telemetry.event("reaudit-failed", error=str(error))

    async def _read_windows(self, send_cases: "trio.MemorySendChannel[WindowCases]", tasks: trio.Nursery) -> None:
        """Read every window's pledges, roster and commitments. A window that cannot be read in time is left out."""
        node, schedule = self._node, self._node.run.schedule
        ahead = (schedule.opening(0) - schedule.pledges(0)) * node.run.beacon.period_ms / 1000
        last_window = self._ledger.closed_window
        if last_window >= 0:
            node.time.record_round(schedule.audit(last_window))  # it was used, so it is out whatever the clock says
        while True:
            window = await node.next_window(last_window, ahead)
            try:
                pledges = await self._pledges.read(self._known_miners(), self._serving_versions(window))
                if node.time.now() >= node.run.opening_time(window):
                    raise StoreError("the pledges were read after the window had opened")
                await node.randomness(schedule.opening(window))
                last_window = window
                tasks.start_soon(self._rosters.get, window)
                await node.time.wait_for_round(schedule.deadline(window))
                send_cases.send_nowait(await self._read_cases(window, pledges))
            except BeaconError as error:  # it has not opened yet, whatever the clock said
                node.telemetry.event("window-missed", window=window, error=str(error))
            except (StoreError, trio.WouldBlock) as error:
                last_window = window
                node.telemetry.event("window-missed", window=window, error=str(error) or "judging is too far behind")

    def _serving_versions(self, window: int) -> ServingVersions | None:
        """Return the versions that may be used in a window, as far as this node knows now; None if it knows none."""
        try:
            newest = self._follower.version_for(window)
        except ProtocolError:
            return None
        return ServingVersions.up_to(newest, self._node.run.schedule.max_lag)

    async def _read_cases(self, window: int, pledges: dict[bytes, Pledge]) -> WindowCases:
        """Return the window's cases without the commitments that were read too late; no miner is blamed for these."""
        cases = await read_window_cases(self._node, window, pledges, self._known_miners())
        draw_time = self._node.run.beacon.round_time(self._node.run.schedule.audit(window))
        for miner in cases.undelivered:
            self._pledges.void(miner)
        in_time = tuple(case for case in cases.cases if case.read_time < draw_time)
        return WindowCases(window, in_time, cases.undelivered)

    def _known_miners(self) -> set[bytes]:
        return {miner for miner, windows in self._ledger.accounts.clean_windows().items() if windows}

    async def _process_window(self, cases: WindowCases, evaluate: bool) -> None:
        """Judge a window, evaluate its version if there is time, and record the window in the ledger."""
        node, schedule, window = self._node, self._node.run.schedule, cases.window
        try:
            if window <= self._ledger.closed_window:
                node.telemetry.event("window-abandoned", window=window, error="it is in the ledger already")
                return
            if await node.time.has_come(schedule.verdict(window)):
                node.telemetry.event("window-abandoned", window=window, error="its verdicts are no longer waited for")
                return
            weights = await self._follower.rebuild(self._follower.version_for(window))
            opening = await node.randomness(schedule.opening(window))
            draw = await node.randomness(schedule.audit(window))
            roster = (await self._rosters.get(window)).joined_by(node.key.public)
            self._rosters.forget(window)
            start = trio.current_time()
            verdicts = await self._judge(cases, weights.version, roster, opening, draw)
            seconds = trio.current_time() - start
            if evaluate:
                with trio.move_on_after(self._seconds_for_judging(window)):
                    await self._evaluate(weights)
            strata = self._count_strata(window, opening, verdicts)
            await self._record(cases, weights, roster, verdicts, seconds, strata)
        except (StoreError, BeaconError, ProtocolError, EngineError) as error:
            node.telemetry.event("window-abandoned", window=window, error=str(error))

    async def _judge(
        self, cases: WindowCases, version: int, roster: Roster, opening: bytes, draw: bytes
    ) -> list[Verdict]:
        """Return the verdict on every case that there is time for."""
        node, window = self._node, cases.window
        judge = Judge(self._task, self._engine, window, opening, self._follower.shares, draw)
        auditor = Auditor(node, judge, roster, draw, self._accepted_work)
        queue = CaseQueue(node, self._ledger, draw)
        versions = ServingVersions.up_to(version, node.run.schedule.max_lag)
        scheduler = JudgingScheduler(node, self._follower, self._engine, auditor, queue, window, versions)
        results = await scheduler.judge(cases.cases, self._seconds_for_judging(window))
        verdicts = [auditor.name_copies(verdict, suspected_copies) for verdict, suspected_copies in results]
        for work in list(self._accepted_work)[: max(0, len(self._accepted_work) - _MAX_ACCEPTED_WORK)]:
            del self._accepted_work[work]
        for verdict in verdicts:
            self._report(verdict)
        return verdicts

    def _seconds_for_judging(self, window: int) -> float:
        """Return the seconds until the window must be sealed or, after that, until nobody waits for its verdicts."""
        node, schedule = self._node, self._node.run.schedule
        seal, now = node.run.beacon.round_time(schedule.seal(window)), node.time.now()
        sealing = seal - _SEALING * (seal - node.run.beacon.round_time(schedule.audit(window)))
        return max(0.0, (sealing if now < sealing else node.run.beacon.round_time(schedule.verdict(window))) - now)

    async def _evaluate(self, weights: VerifiedWeights) -> None:
        """Solve held-out problems by the run's rule, once for each version."""
        count = self._node.run.evaluation.problems if self._settings.evaluate else 0
        if count == 0 or self._evaluated_version == weights.version:
            return
        await serve(self._node, self._engine, weights)
        try:
            self._evaluation = await evaluate(self._task, self._engine, weights.version)
        except SandboxLimitError as error:  # so would the next try end: the problems are the same
            self._node.telemetry.event("not-evaluated", version=weights.version, error=str(error))
        self._evaluated_version = weights.version

    def _count_strata(self, window: int, opening: bytes, verdicts: list[Verdict]) -> Counts | None:
        """Return the accepted groups by stratum, with those of the windows before; None in a run without tables."""
        node, last = self._node, self._ledger.last
        if node.run.difficulty is None:
            return None
        groups: list[tuple[int, bool]] = []
        with suppress(GapError):  # the roots have taken back a version meanwhile
            groups = list(accepted_groups(node.run_id, opening, verdicts, self._follower.shares))
        before, newest = (last.strata, last.window) if last else (None, window)
        return node.run.difficulty.count(before, window - newest, groups)

    async def _record(
        self,
        cases: WindowCases,
        weights: VerifiedWeights,
        roster: Roster,
        verdicts: list[Verdict],
        seconds: float,
        strata: Counts | None,
    ) -> None:
        """Record the window in the ledger, and have it sealed."""
        node, evaluation = self._node, self._evaluation
        rows = [LedgerRow.of(verdict) for verdict in verdicts]
        versions = ServingVersions.up_to(weights.version, node.run.schedule.max_lag)
        rows += [
            LedgerRow(miner=miner, pledged=pledge.groups)
            for miner, pledge in cases.undelivered.items()
            if versions.refusal(pledge.version, was_allowed=pledge.was_allowed) is not Reason.LAPSED
        ]
        summary = Summary(
            run=node.run_id,
            window=cases.window,
            version=weights.version,
            validator=node.key.public,
            previous=self._ledger.tip,
            salt=node.key.derive("salt", cases.window)[:16],
            weights=weights.digest,
            roster=roster.validators,
            judges=min(roster.judges, len(roster.validators)),
            arithmetic=self._engine.arithmetic,
            rows=tuple(sorted(rows, key=lambda row: row.miner)),
            amendments=self._reaudit.take_amendments(),
            scores=(),
            evaluation=evaluation if evaluation and evaluation.version == weights.version else None,
            verified_tokens=sum(judgement.tokens for verdict in verdicts for judgement in verdict.judgements),
            verify_ms=round(seconds * 1000),
            alarms=node.alarms.drain(),
            strata=strata,
        )
        await self._revealer.store_verdicts(cases.window, verdicts)
        await self._revealer.add_window(await self._ledger.record(summary))

    def _report(self, verdict: Verdict) -> None:
        self._node.telemetry.event(
            "verdict",
            window=verdict.window,
            miner=verdict.miner.hex()[:8],
            accepted=sum(judgement.accepted for judgement in verdict.judgements),
            rejected=sum(judgement.rejected for judgement in verdict.judgements),
            reasons=",".join(sorted({judgement.reason for judgement in verdict.judgements if judgement.reason})),
        )
