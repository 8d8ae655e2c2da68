"""The download process: verdicts in, verified groups for the learner out.

For every miner's window: read the validators' verdicts, decide, fetch what enough of them accept, check its digest
again, hand it over, and write the account (settlement.py).

A group is settled as soon as it is decided. Groups that only a validator who is heard later has judged, or that were
open until then, add to what is settled.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import inf

import trio

from protocol import paths
from protocol.identity.signing import sign
from roles.node.identity import Node
from roles.ports import StoreError
from roles.trainer.collect.acceptance import Acceptance
from roles.trainer.collect.outcome_log import OutcomeLog
from roles.trainer.collect.quorum import Decision, decide
from roles.trainer.collect.validator_monitor import ValidatorMonitor
from roles.trainer.collect.verdict_reader import VerdictReader


@dataclass(frozen=True)
class CollectorSettings:
    """What a trainer's operator decides.

    Attributes:
        poll_seconds: how often to look for verdicts.
        keep_accounts: windows whose accounts stay in the node's state.
        canaries: miners that this node has run to test the validators: nothing of theirs is trained on.
    """

    poll_seconds: float = 0.25
    keep_accounts: int = 1000
    canaries: int = 0


_LAST_LOOKS = 3  # at a window that is over, as storage may have hidden or bent what it showed at one
_AT_ONCE = 16  # miners' windows that are being settled, and as many of miners whose storage failed the last time
_BACKLOG = 64  # windows behind the oldest one that are looked at, beside those that are open


@dataclass(frozen=True)
class _Later:
    """When to look at a miner's storage again that did not answer, or not with what was promised (trio's time), the
    pause before that, and how often it was looked at since the window was over.
    """

    moment: float = -inf
    pause: float = 0.5
    looks: int = 0

    def due(self, now: float, closed: bool) -> bool:
        """Whether to look: when the pause is over, and at once when the window is."""
        return now >= self.moment or (closed and self.looks == 0)

    def after(self, now: float, closed: bool) -> "_Later":
        """Twice the pause from now on, up to half a minute: who does not answer costs the others little."""
        looks = self.looks + closed
        pause = 0.5 if closed and looks < _LAST_LOOKS else min(30.0, 2 * self.pause)
        return _Later(now + pause, pause, looks)


class Collector:
    """Collects the verified groups of one run for one trainer."""

    def __init__(self, node: Node, settings: CollectorSettings) -> None:
        self._node = node
        self._settings = settings
        self._hearings: dict[int, VerdictReader] = {}
        self._overseer = ValidatorMonitor(node, settings.canaries)
        self._since = 0.0
        self._accounts = OutcomeLog(node.state)
        self._settlement = Acceptance(node, self._accounts, self._overseer.canaries)
        self._settled: dict[tuple[int, bytes], int] = {}  # how many verdicts on a miner's window the account speaks for
        self._later: dict[tuple[int, bytes], _Later] = {}
        self._settling: set[tuple[int, bytes]] = set()
        self._slow: set[bytes] = set()  # miners whose storage failed the last time: they wait for each other
        self._slots, self._slow_slots = trio.CapacityLimiter(_AT_ONCE), trio.CapacityLimiter(_AT_ONCE)

    async def run(self) -> None:
        """Collect for ever.

        Raises:
            StoreError: this node's own state cannot be read or written.
        """
        node = self._node
        await self._overseer.open()
        await self._accounts.open()
        await self._settlement.open()
        self._since = await node.time.proven_time()
        # whoever was away for long goes on where it was: the verdicts still lie there, and want an account
        now = node.run.window_at(self._since)
        oldest = now - self._windows_open() if self._accounts.oldest is None else self._accounts.oldest
        oldest = max(0, oldest, now - self._settings.keep_accounts)
        await self._accounts.advance(oldest)
        async with trio.open_nursery() as tasks:
            await self._collect_all(oldest, tasks)

    async def _collect_all(self, oldest: int, tasks: trio.Nursery) -> None:
        while True:
            windows = {window: await self._closed(window) for window in self._windows(oldest)}
            await self._listen(windows, tasks)
            finished = {window for window, closed in windows.items() if await self._collect(window, closed, tasks)}
            while oldest in finished:
                await self._close(oldest, tasks)
                oldest += 1
            await trio.sleep(self._settings.poll_seconds)

    async def _listen(self, windows: Mapping[int, bool], tasks: trio.Nursery) -> None:
        """Hear everybody of windows (and whether they are closed); whoever takes longer than a moment is not waited
        for.
        """
        heard = trio.Event()

        async def listen() -> None:
            async with trio.open_nursery() as nursery:
                for window, closed in windows.items():
                    self._hearing(window).listen(self._overseer.distrusted, closed, nursery)
            heard.set()

        tasks.start_soon(listen)
        with trio.move_on_after(self._settings.poll_seconds):
            await heard.wait()

    def _windows(self, oldest: int) -> list[int]:
        """Those to look at: the first of those that are left, and the open ones, however far these are behind.

        The clock may be ahead; no window is open that the beacon does not know of.
        """
        node = self._node
        now = min(node.window(), node.run.schedule.window_at(node.time.newest_round) + self._windows_open())
        recent = max(oldest + _BACKLOG, now - self._windows_open())
        return [*range(oldest, min(oldest + _BACKLOG, now + 1)), *range(recent, now + 1)]

    async def _close(self, window: int, tasks: trio.Nursery) -> None:
        """Nothing more comes of a window."""
        node = self._node
        report = self._overseer.report(window)
        if report is not None:
            tasks.start_soon(node.publish, paths.report(node.key.public, window), sign(report, node.key))
        self._hearings.pop(window).close(self._overseer.distrusted)
        self._settled = {key: heard for key, heard in self._settled.items() if key[0] != window}
        try:
            self._accounts.close(window)
            await self._accounts.advance(window + 1)
            await self._accounts.forget(
                node.run.schedule.window_at(node.time.newest_round) - self._settings.keep_accounts
            )
        except StoreError as error:  # remembered with the next window
            node.telemetry.event("collect-failed", window=window, error=str(error))

    @property
    def open_windows(self) -> set[int]:
        """Windows of which something may still come."""
        return set(self._hearings)

    def _hearing(self, window: int) -> VerdictReader:
        return self._hearings.setdefault(window, VerdictReader(self._node, window, self._since))

    def _windows_open(self) -> int:
        schedule = self._node.run.schedule
        return -(-schedule.verdict_rounds // schedule.rounds)

    async def _closed(self, window: int) -> bool:
        """Whether nobody's verdicts are waited for any more; what is not accounted for then never is, so a clock is not
        enough.
        """
        return await self._node.time.has_come(self._node.run.schedule.verdict(window))

    async def _collect(self, window: int, closed: bool, tasks: trio.Nursery) -> bool:
        """Settle every miner of whom something is decided in a window; whether that was all.

        It was not while the window is open, nor where the last look at a validator failed: what that would have shown
        is missing. A validator whose storage stays silent for as long again as the window had is not waited for any
        more.
        """
        hearing, ignored = self._hearing(window), self._overseer.distrusted
        final = closed and hearing.looked(_LAST_LOOKS, ignored, given_up=await self._given_up(window))
        waiting = False
        try:
            for miner, verdicts in list(hearing.verdicts.items()):  # others add to it meanwhile
                if miner in self._overseer.canaries:
                    await self._overseer.examine(window, miner, verdicts)
                if final or not hearing.outstanding(ignored):
                    self._overseer.compare(window, miner, verdicts)
                elif miner in self._overseer.canaries:
                    continue
                if self._settled.get((window, miner), 0) == len(verdicts):
                    continue
                waiting = True
                due = self._retry(window, miner).due(trio.current_time(), closed)
                if due and (window, miner) not in self._settling:
                    self._settling.add((window, miner))
                    tasks.start_soon(self._settle, window, miner, final)
        except StoreError as error:
            self._node.telemetry.event("collect-failed", window=window, error=str(error))
            return False
        return final and not waiting

    async def _undecided(self, window: int, miner: bytes, final: bool) -> list[Decision]:
        """The decisions that the account of a miner's window does not name yet."""
        authority, hearing, ignored = self._node.authority, self._hearing(window), self._overseer.distrusted
        counting = set(authority.validators) - ignored - hearing.sealed_twice
        believed = [verdict for validator, verdict in hearing.verdicts[miner].items() if validator in counting]
        named = {outcome.group for outcome in await self._accounts.outcomes(window, miner)}
        outstanding = 0 if final else len(hearing.outstanding_on(miner, ignored))
        return [d for d in decide(believed, authority.quorum, outstanding) if d.group not in named]

    async def _settle(self, window: int, miner: bytes, final: bool) -> None:
        """Settle a miner's window beside all others: storage that does not answer costs its owner, and it not for ever."""
        retry, closed = self._retry(window, miner), False
        try:
            async with self._slow_slots if miner in self._slow else self._slots:
                closed = await self._closed(window)
                await self._settlement.finish(window, miner)
                heard = len(self._hearing(window).verdicts[miner])
                decisions = await self._undecided(window, miner, final)
                decided = [decision for decision in decisions if not decision.open]
                if decided or not (decisions or self._accounts.holds(window, miner)):
                    last, given_up = closed and retry.looks + 1 >= _LAST_LOOKS, partial(self._given_up, window)
                    if await self._settlement.settle(window, miner, decided, last=last, given_up=given_up):
                        self._slow.discard(miner)
            if len(decided) == len(decisions):
                self._settled[window, miner] = heard
                self._later.pop((window, miner), None)
        except StoreError as error:
            self._node.telemetry.event("collect-failed", window=window, miner=miner.hex()[:8], error=str(error))
            self._slow.add(miner)
            self._later[window, miner] = retry.after(trio.current_time(), closed)
        finally:
            self._settling.remove((window, miner))

    def _retry(self, window: int, miner: bytes) -> _Later:
        return self._later.get((window, miner), _Later())

    async def _given_up(self, window: int) -> bool:
        """Whether as much time has gone by since a window's end as its verdicts had."""
        schedule = self._node.run.schedule
        return await self._node.time.has_come(schedule.verdict(window) + schedule.verdict_rounds)
