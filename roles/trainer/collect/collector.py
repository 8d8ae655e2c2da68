"""The download process: verdicts in, verified groups for the learner out.

For every miner's window it reads the validators' verdicts (verdict_reader.py), decides (quorum.py), fetches the groups
that enough validators accept, checks their digests again, hands them over and logs what became of each (acceptance.py).

A group is handed over as soon as it is decided. Groups that a later verdict judges, or that were pending until then,
are appended to the outcome log of the window.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from math import inf

import trio

from protocol import paths
from protocol.difficulty import Counts, DifficultyTable
from protocol.identity.signing import sign
from roles.node.identity import Node
from roles.node.retries import Pause
from roles.ports import BeaconError, StoreError
from roles.rosters import Rosters
from roles.trainer.collect.acceptance import Acceptance, OutcomeLog
from roles.trainer.collect.quorum import Decision, decide, refuse_improbable_window
from roles.trainer.collect.validator_monitor import Absences, ValidatorMonitor
from roles.trainer.collect.verdict_reader import VerdictReader
from roles.trainer.spool import DIFFICULTY

_OUTCOME_WINDOWS = 1000  # that the outcome log keeps
_FINAL_ATTEMPTS = 3  # reads after a window's deadline, because storage may show something wrong at one of them
_MAX_CONCURRENT = 64  # miners' windows at once, and as many again of miners whose storage failed the last time
_PAUSE = Pause(first=0.5, longest=30.0)  # before a window whose storage did not answer is read again
_BACKLOG_WINDOWS = 64  # of the oldest windows that are collected at once, beside those that are still open


@dataclass(frozen=True)
class _Retry:
    """When to read a miner's window again after its storage did not answer, or not with what was promised."""

    time: float = -inf  # not before this, in trio's seconds
    delay: float = _PAUSE.first  # the seconds from the last attempt until then
    final_attempts: int = 0  # since the window's deadline

    def permits(self, now: float, after_deadline: bool) -> bool:
        """Whether to try now: when the delay is over, and at once when the deadline has passed."""
        return now >= self.time or (after_deadline and self.final_attempts == 0)

    def next(self, now: float, after_deadline: bool) -> "_Retry":
        """Return the retry after this one: later each time, but at once for the last tries after the deadline."""
        final_attempts = self.final_attempts + after_deadline
        soon = after_deadline and final_attempts < _FINAL_ATTEMPTS
        delay = _PAUSE.after(0.0 if soon else self.delay)
        return _Retry(now + delay, delay, final_attempts)


class Collector:
    """Collects the verified groups of one run for one trainer; those of its own canary miners are not trained on."""

    def __init__(self, node: Node, poll_seconds: float = 0.25, canaries: int = 0) -> None:
        self._node = node
        self._pause = node.pace(poll_seconds)
        self._readers: dict[int, VerdictReader] = {}
        self._rosters = Rosters(node)
        self._absences = Absences(node.telemetry)
        self._monitor = ValidatorMonitor(node, canaries)
        self._table_window = -1  # of the newest difficulty table
        self._start_time = 0.0
        self._outcome_log = OutcomeLog(node.state)
        self._acceptance = Acceptance(node, self._outcome_log, self._monitor.canaries)
        # by window, miners with decisions that wait for other validators, and the state in which they were decided
        self._pending: dict[int, tuple[object, set[bytes]]] = {}
        self._retries: dict[tuple[int, bytes], _Retry] = {}
        self._active: set[tuple[int, bytes]] = set()  # miners' windows that have a task
        self._slow_miners: set[bytes] = set()  # those whose storage failed the last time wait for each other
        self._slots, self._slow_slots = trio.CapacityLimiter(_MAX_CONCURRENT), trio.CapacityLimiter(_MAX_CONCURRENT)

    async def run(self) -> None:
        """Collect for ever."""
        node = self._node
        await self._monitor.open()
        await self._outcome_log.open()
        await self._acceptance.open()
        self._start_time = await node.time.proven_time()
        # after a long absence it goes on with the window where it stopped: the verdicts of that time are still there
        now, oldest_logged = node.run.window_at(self._start_time), self._outcome_log.oldest_window
        oldest = now - self._open_window_count() if oldest_logged is None else oldest_logged
        oldest = max(0, oldest, now - _OUTCOME_WINDOWS)
        await self._outcome_log.advance(oldest)
        async with trio.open_nursery() as tasks:
            while True:
                windows = {window: await self._deadline_has_passed(window) for window in self._windows(oldest)}
                for window in sorted(windows.keys() - self._readers.keys()):
                    tasks.start_soon(self._rosters.get, window)
                await self._read_validators(windows, tasks)
                complete_windows = {
                    window
                    for window, after_deadline in windows.items()
                    if await self._collect(window, after_deadline, tasks)
                }
                while oldest in complete_windows:
                    await self._close(oldest, tasks)
                    oldest += 1
                await trio.sleep(self._pause)

    async def _read_validators(self, windows: Mapping[int, bool], tasks: trio.Nursery) -> None:
        """Read the validators of all windows; reads that take longer than a poll go on alone."""
        all_read = trio.Event()

        async def read() -> None:
            async with trio.open_nursery() as nursery:
                for window, after_deadline in windows.items():
                    self._reader(window).start_reading(self._monitor.distrusted_validators, after_deadline, nursery)
            all_read.set()

        tasks.start_soon(read)
        with trio.move_on_after(self._pause):
            await all_read.wait()

    def _windows(self, oldest: int) -> list[int]:
        """Return the windows to collect: the oldest unfinished ones, and all that are still open however late they are.
        The clock may be ahead; a window that the beacon has not reached is not open.
        """
        node = self._node
        now = min(node.window(), node.run.schedule.window_at(node.time.newest_round) + self._open_window_count())
        recent = max(oldest + _BACKLOG_WINDOWS, now - self._open_window_count())
        return [*range(oldest, min(oldest + _BACKLOG_WINDOWS, now + 1)), *range(recent, now + 1)]

    async def _close(self, window: int, tasks: trio.Nursery) -> None:
        """Finish a window for which no more verdicts come: publish the report, and free its memory."""
        node = self._node
        await self._monitor.finish(window)
        report = self._monitor.report(window)
        if report is not None:
            tasks.start_soon(node.publish, paths.report(node.key.public, window), sign(report, node.key))
        await self._monitor.forget(window)
        self._readers.pop(window).close(self._monitor.distrusted_validators)
        self._rosters.forget(window)
        self._pending.pop(window, None)
        await self._outcome_log.advance(window + 1)
        proven_window = node.run.schedule.window_at(node.time.newest_round)
        await self._outcome_log.delete_before(proven_window - _OUTCOME_WINDOWS)

    def _reader(self, window: int) -> VerdictReader:
        if window not in self._readers:
            canaries = self._monitor.canaries
            self._readers[window] = VerdictReader(self._node, window, self._start_time, self._absences, canaries)
        return self._readers[window]

    def _open_window_count(self) -> int:
        schedule = self._node.run.schedule
        return -(-schedule.verdict_rounds // schedule.rounds)

    async def _deadline_has_passed(self, window: int) -> bool:
        """Whether the deadline for a window's verdicts has passed by the beacon: what comes later is never logged."""
        return await self._node.time.has_come(self._node.run.schedule.verdict(window))

    async def _collect(self, window: int, after_deadline: bool, tasks: trio.Nursery) -> bool:
        """Start a task for every miner whose verdicts of a window are not processed; return whether the window is done.

        It is not done before the deadline, nor while the last read of a validator failed, because verdicts may be
        missing. A validator whose storage stays silent for as long again as the window had is given up.
        """
        reader, ignored = self._reader(window), self._monitor.distrusted_validators
        final = after_deadline and reader.is_complete(
            _FINAL_ATTEMPTS, ignored, timed_out=await self._has_timed_out(window)
        )
        ledgers = reader.stratum_counts(ignored)
        if window > self._table_window and (final or set(self._node.authority.validators) <= ledgers.keys() | ignored):
            await self._write_table(window, ledgers)
        canaries = reader.verdicts.keys() & self._monitor.canaries
        for miner in canaries:
            await self._monitor.examine(window, miner, reader.verdicts[miner])
        is_whole = final or not reader.outstanding(ignored)
        for miner in self._monitor.uncompared(window, reader.verdicts) if is_whole else ():
            is_paid = len(reader.paying(miner)) >= self._node.authority.quorum
            self._monitor.compare(window, miner, reader.verdicts[miner], is_paid=is_paid)
            await trio.lowlevel.checkpoint()  # a window may have thousands of miners
        state = final, reader.state(ignored), self._monitor.logprob_rule.biased_pairs, self._node.revisions.number
        before, pending = self._pending.get(window, (state, set()))
        if before != state:
            reader.unprocessed |= pending
            pending = set()
        self._pending[window] = state, pending
        for miner in reader.unprocessed if is_whole else reader.unprocessed - canaries:
            may_start = self._retry(window, miner).permits(trio.current_time(), after_deadline)
            if may_start and (window, miner) not in self._active:
                self._active.add((window, miner))
                tasks.start_soon(self._process, window, miner, final)
        return final and not reader.unprocessed and not pending

    async def _write_table(self, window: int, ledgers: Mapping[bytes, tuple[bytes, Counts]]) -> None:
        """Write the difficulty table of a window into the spool, if the summaries of enough validators count."""
        node, rule = self._node, self._node.run.difficulty
        counting = {
            validator: item
            for validator, item in ledgers.items()
            if rule is not None and validator in node.authority.validators and len(item[1]) == len(rule.strata)
        }
        if rule is not None and len(counting) >= node.authority.quorum:
            table = DifficultyTable.of(rule, window, counting)
            await node.state.put(DIFFICULTY, table.to_bytes())
            self._table_window = window
            shares = ",".join(f"{item.name}={share}" for item, share in zip(rule.strata, table.shares, strict=True))
            node.telemetry.event("difficulty", window=window, validators=len(counting), shares=shares)

    async def _unlogged_decisions(self, window: int, miner: bytes, final: bool) -> list[Decision]:
        """Return the decisions on groups of a miner's window that the outcome log does not name yet."""
        authority, reader, ignored = self._node.authority, self._reader(window), self._monitor.distrusted_validators
        counting = set(authority.validators) - ignored - reader.equivocators
        verdicts = [verdict for validator, verdict in reader.verdicts[miner].items() if validator in counting]
        logged_groups = {outcome.group for outcome in await self._outcome_log.outcomes(window, miner)}
        outstanding = frozenset() if final else reader.outstanding_on(miner, ignored)
        rule, paying, judges_of = self._monitor.logprob_rule, reader.paying(miner), await self._judges_of(window, miner)
        decisions = decide(verdicts, authority.quorum, outstanding, rule, paying, judges_of)
        decisions = refuse_improbable_window(decisions, rule.proof)
        return [decision for decision in decisions if decision.group not in logged_groups]

    async def _judges_of(self, window: int, miner: bytes) -> Callable[[int], Set[bytes]]:
        """Return a function that gives the validators to which a group of a miner's window was dealt."""
        node, roster = self._node, await self._rosters.get(window)
        if roster.judges >= len(roster.validators):
            judges = frozenset(roster.validators)
            return lambda group: judges
        try:
            draw = await node.randomness(node.run.schedule.audit(window))
        except BeaconError as error:
            if await self._has_timed_out(window):
                return lambda group: frozenset()
            raise StoreError(f"window {window} is not dealt: {error}") from error
        return lambda group: roster.judges_of(node.run_id, window, draw, miner, group)

    async def _process(self, window: int, miner: bytes, final: bool) -> None:
        """Hand over and log what is decided on a miner's window, in a task that delays no other miner."""
        retry, after_deadline, reader = self._retry(window, miner), False, self._reader(window)
        try:
            async with self._slow_slots if miner in self._slow_miners else self._slots:
                after_deadline = await self._deadline_has_passed(window)
                verdict_count, (_, pending) = len(reader.verdicts[miner]), self._pending[window]
                decisions = await self._unlogged_decisions(window, miner, final)
                final_decisions = [decision for decision in decisions if not decision.pending]
                if final_decisions or not (decisions or self._outcome_log.has_entries(window, miner)):
                    storage_answered = await self._acceptance.accept(
                        window,
                        miner,
                        final_decisions,
                        final_attempt=after_deadline and retry.final_attempts + 1 >= _FINAL_ATTEMPTS,
                        timed_out=partial(self._has_timed_out, window),
                    )
                    if storage_answered:
                        self._slow_miners.discard(miner)
            if len(reader.verdicts[miner]) == verdict_count and self._pending[window][1] is pending:  # else once more
                reader.unprocessed.discard(miner)
                if len(final_decisions) < len(decisions):
                    pending.add(miner)
            if len(final_decisions) == len(decisions):
                self._retries.pop((window, miner), None)
        except StoreError as error:
            self._node.telemetry.event("collect-failed", window=window, miner=miner.hex()[:8], error=str(error))
            self._slow_miners.add(miner)
            self._retries[window, miner] = retry.next(trio.current_time(), after_deadline)
        finally:
            self._active.remove((window, miner))

    def _retry(self, window: int, miner: bytes) -> _Retry:
        return self._retries.get((window, miner), _Retry())

    async def _has_timed_out(self, window: int) -> bool:
        """Whether as much time has passed since a window's deadline as its verdicts had."""
        schedule = self._node.run.schedule
        return await self._node.time.has_come(schedule.verdict(window) + schedule.verdict_rounds)
