"""The download process: verdicts in, verified groups for the learner out.

For every miner's window: read the validators' verdicts, decide, fetch what enough of them accept, check its digest again, and
hand it over; then write the account. The harvest lies at a path of its own and is complete or not there, so doing this twice
after a crash changes nothing: the learner refuses a group that it has seen.

A miner is settled as soon as all of its groups that anybody has judged are decided. A validator that judges more of them than the
others and is heard later adds to what is settled.
"""

from dataclasses import dataclass
from functools import partial
from math import inf

import trio

from roles.node import Node
from roles.ports import StoreError
from roles.trainer.accounts import Accounts
from roles.trainer.hearing import Hearing
from roles.trainer.overseer import Overseer
from roles.trainer.quorum import Decision, decide
from roles.trainer.settlement import Settlement


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
_AT_ONCE = 16  # miners' windows that are being settled


@dataclass(frozen=True)
class _Later:
    """When to ask a miner's storage again that did not answer (trio's time), and the pause before that."""

    moment: float = -inf
    pause: float = 0.5

    def after(self, now: float) -> "_Later":
        """Twice the pause from now on, up to half a minute: who does not answer costs the others little."""
        pause = min(30.0, 2 * self.pause)
        return _Later(now + pause, pause)


class Collector:
    """Collects the verified groups of one run for one trainer."""

    def __init__(self, node: Node, settings: CollectorSettings) -> None:
        self._node = node
        self._settings = settings
        self._hearings: dict[int, Hearing] = {}
        self._overseer = Overseer(node, settings.canaries)
        self._since = 0.0
        self._accounts = Accounts(node.state)
        self._settlement = Settlement(node, self._accounts, self._overseer.canaries)
        self._settled: dict[tuple[int, bytes], int] = {}  # how many verdicts on a miner's window the account speaks for
        self._later: dict[tuple[int, bytes], _Later] = {}
        self._settling: set[tuple[int, bytes]] = set()
        self._slots = trio.CapacityLimiter(_AT_ONCE)

    async def run(self) -> None:
        """Collect for ever.

        Raises:
            StoreError: this node's own state cannot be read or written.
        """
        node = self._node
        await self._overseer.open()
        await self._accounts.open()
        self._since = await node.time.moment()
        now = node.run.window_at(self._since)
        # whoever was away for long goes on where it was: the verdicts still lie there, and want an account
        newest = self._accounts.newest
        last = min(now, now - self._settings.keep_accounts if newest is None else newest)
        oldest = max(0, last - self._windows_open())
        async with trio.open_nursery() as tasks:
            await self._collect_all(oldest, tasks)

    async def _collect_all(self, oldest: int, tasks: trio.Nursery) -> None:
        node = self._node
        while True:
            now = node.window()
            finished = {window for window in range(oldest, now + 1) if await self._collect(window, tasks)}
            while oldest in finished:
                await self._overseer.report(oldest)
                self._hearings.pop(oldest).close(self._overseer.distrusted)
                self._settled = {key: heard for key, heard in self._settled.items() if key[0] != oldest}
                self._accounts.close(oldest)
                oldest += 1
            proven = node.run.schedule.window_at(node.time.proven)
            await self._accounts.forget(proven - self._settings.keep_accounts)
            await trio.sleep(self._settings.poll_seconds)

    @property
    def open_windows(self) -> set[int]:
        """Windows of which something may still come."""
        return set(self._hearings)

    def _hearing(self, window: int) -> Hearing:
        return self._hearings.setdefault(window, Hearing(self._node, window, self._since))

    def _windows_open(self) -> int:
        schedule = self._node.run.schedule
        return -(-schedule.verdict_rounds // schedule.rounds)

    async def _closed(self, window: int) -> bool:
        """Whether nobody's verdicts are waited for any more; what is not accounted for then never is, so a clock is not enough."""
        return await self._node.time.has_come(self._node.run.schedule.verdict(window))

    async def _collect(self, window: int, tasks: trio.Nursery) -> bool:
        """Hear a window's validators and settle every miner whose groups are all decided; whether that was all.

        It was not while the window is open, nor where the last look at a validator failed: what that would have shown is missing.
        A validator whose storage stays silent for as long again as the window had is not waited for any more.
        """
        hearing, ignored = self._hearing(window), self._overseer.distrusted
        closed = await self._closed(window)  # asked before reading, so that the last look comes after the end
        try:
            heard = await hearing.listen(ignored) or await self._given_up(window)
            hearing.last_looks += closed and heard
            final = closed and heard and (hearing.last_looks >= _LAST_LOOKS or not hearing.outstanding(ignored))
            outstanding = 0 if final else hearing.outstanding(ignored)
            for miner, verdicts in hearing.verdicts.items():
                if outstanding == 0:
                    await self._overseer.hear(window, miner, verdicts)
                elif miner in self._overseer.canaries:
                    continue
                if (window, miner) in self._settling or trio.current_time() < self._retry(window, miner).moment:
                    continue
                if self._settled.get((window, miner), 0) < len(verdicts):
                    self._settling.add((window, miner))
                    tasks.start_soon(self._settle_once, window, miner, outstanding, closed)
        except StoreError as error:
            self._node.telemetry.event("collect-failed", window=window, error=str(error))
            return False
        settled = all(self._settled.get((window, miner), 0) >= len(v) for miner, v in hearing.verdicts.items())
        return final and settled

    async def _decided(self, window: int, miner: bytes, outstanding: int) -> list[Decision] | None:
        """The decisions that the account of a miner's window does not name yet; None while one of them is open."""
        authority, verdicts = self._node.authority, self._hearing(window).verdicts[miner]
        counting = set(authority.validators) - self._overseer.distrusted
        believed = [verdict for validator, verdict in verdicts.items() if validator in counting]
        named = {outcome.group for outcome in await self._accounts.outcomes(window, miner)}
        decisions = [d for d in decide(believed, authority.quorum, outstanding) if d.group not in named]
        return None if any(decision.open for decision in decisions) else decisions

    async def _settle_once(self, window: int, miner: bytes, outstanding: int, closed: bool) -> None:
        """Settle a miner's window beside all others: storage that does not answer costs its owner, and it not for ever."""
        node = self._node
        try:
            async with self._slots:
                heard = len(self._hearing(window).verdicts[miner])
                decisions = await self._decided(window, miner, outstanding)
                if decisions is None:
                    return
                if decisions or not self._accounts.holds(window, miner):
                    given_up = partial(self._given_up, window)
                    await self._settlement.settle(window, miner, decisions, closed=closed, given_up=given_up)
            self._settled[window, miner] = heard
            self._later.pop((window, miner), None)
        except StoreError as error:
            node.telemetry.event("collect-failed", window=window, miner=miner.hex()[:8], error=str(error))
            self._later[window, miner] = self._retry(window, miner).after(trio.current_time())
        finally:
            self._settling.remove((window, miner))

    def _retry(self, window: int, miner: bytes) -> _Later:
        return self._later.get((window, miner), _Later())

    async def _given_up(self, window: int) -> bool:
        """Whether as much time has gone by since a window's end as its verdicts had."""
        schedule = self._node.run.schedule
        return await self._node.time.has_come(schedule.verdict(window) + schedule.verdict_rounds)
