"""The download process: verdicts in, verified groups for the learner out.

For every miner's window: read the validators' verdicts, decide, fetch what enough of them accept, check its digest again, and
hand it over; then write the account. The harvest lies at a path of its own and is complete or not there, so doing this twice
after a crash changes nothing: the learner refuses a group that it has seen.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

import trio

from protocol import environments, limits, paths
from protocol.errors import MalformedError, ProtocolError
from protocol.rollout import Commitment, open_group
from protocol.signing import Signed, open_signed
from roles.node import Node
from roles.ports import NotFoundError, StoreError, TooLargeError
from roles.trainer.harvest import CANARY, USED, Account, Harvest, HarvestedGroup, harvested
from roles.trainer.hearing import Hearing
from roles.trainer.overseer import Overseer
from roles.trainer.quorum import Decision, decide
from roles.trainer.spool import COLLECTED, INBOX


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


def _name(window: int, miner: bytes) -> str:
    return f"{window:010d}-{miner.hex()}"


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
        self._done: dict[int, set[bytes]] = {}
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
        async for item in node.state.list(COLLECTED):
            path = item.path.removeprefix(COLLECTED)
            self._done.setdefault(paths.window_of(path), set()).add(paths.key_at_end(path))
        self._since = await node.time.moment()
        now = node.run.window_at(self._since)
        # whoever was away for long goes on where it was: the verdicts still lie there, and want an account
        last = min(now, max(self._done, default=now - self._settings.keep_accounts))
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
                oldest += 1
            proven = node.run.schedule.window_at(node.time.proven)
            await self._forget(proven - self._settings.keep_accounts)
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
        done = self._done.setdefault(window, set())
        try:
            heard = await hearing.listen(ignored) or await self._given_up(window)
            hearing.last_looks += closed and heard
            final = closed and heard and (hearing.last_looks >= _LAST_LOOKS or not hearing.outstanding(ignored))
            outstanding = 0 if final else hearing.outstanding(ignored)
            for miner, verdicts in hearing.verdicts.items():
                if miner in done or (miner in self._overseer.canaries and outstanding):
                    continue
                if (window, miner) in self._settling or trio.current_time() < self._retry(window, miner).moment:
                    continue
                authority = self._node.authority
                counting = set(authority.validators) - ignored
                believed = [verdict for validator, verdict in verdicts.items() if validator in counting]
                decisions = decide(believed, authority.quorum, outstanding)
                if not any(decision.open for decision in decisions):
                    await self._overseer.hear(window, miner, verdicts)
                    self._settling.add((window, miner))
                    tasks.start_soon(self._settle_once, window, miner, decisions, closed)
        except StoreError as error:
            self._node.telemetry.event("collect-failed", window=window, error=str(error))
            return False
        return final and hearing.verdicts.keys() <= done

    async def _settle_once(self, window: int, miner: bytes, decisions: list[Decision], closed: bool) -> None:
        """Settle a miner's window beside all others: storage that does not answer costs its owner, and it not for ever."""
        try:
            async with self._slots:
                await self._settle(window, miner, decisions, closed)
            self._done[window].add(miner)
            self._later.pop((window, miner), None)
        except StoreError as error:
            self._node.telemetry.event("collect-failed", window=window, miner=miner.hex()[:8], error=str(error))
            self._later[window, miner] = self._retry(window, miner).after(trio.current_time())
            if await self._given_up(window):
                await self._account_unreachable(window, miner, decisions)
        finally:
            self._settling.remove((window, miner))

    async def _account_unreachable(self, window: int, miner: bytes, decisions: list[Decision]) -> None:
        outcomes = tuple((decision.digest, decision.reason or "unreachable") for decision in decisions)
        account = Account(window=window, miner=miner, outcomes=outcomes)
        with suppress(StoreError):  # this node's own disk; the same moment comes again
            await self._node.state.put(COLLECTED + _name(window, miner), account.to_bytes())
            self._done[window].add(miner)
            self._later.pop((window, miner), None)

    def _retry(self, window: int, miner: bytes) -> _Later:
        return self._later.get((window, miner), _Later())

    async def _given_up(self, window: int) -> bool:
        """Whether as much time has gone by since a window's end as its verdicts had."""
        schedule = self._node.run.schedule
        return await self._node.time.has_come(schedule.verdict(window) + schedule.verdict_rounds)

    async def _settle(self, window: int, miner: bytes, decisions: list[Decision], closed: bool) -> None:
        """Fetch what is accepted, hand it over, and account for everything.

        Raises:
            StoreError: the storage did not answer; nothing is settled yet.
        """
        if miner in self._overseer.canaries:
            decisions = [replace(decision, reason=CANARY) for decision in decisions]
        accepted = [decision for decision in decisions if not decision.reason]
        outcomes = [(decision.digest, decision.reason) for decision in decisions if decision.reason]
        groups: list[HarvestedGroup] = []
        commitment = await self._commitment(window, miner) if accepted else None
        for decision in accepted:
            group = await self._fetch(commitment, decision, closed)
            if isinstance(group, HarvestedGroup):
                groups.append(group)
            outcomes.append((decision.digest, USED if isinstance(group, HarvestedGroup) else group))
        if groups and commitment is not None:
            harvest = Harvest(window=window, version=commitment.record.version, miner=miner, groups=tuple(groups))
            await self._node.state.put(INBOX + _name(window, miner), harvest.to_bytes())
        account = Account(window=window, miner=miner, outcomes=tuple(outcomes))
        await self._node.state.put(COLLECTED + _name(window, miner), account.to_bytes())
        self._node.telemetry.event(
            "collected", window=window, miner=miner.hex()[:8], used=len(groups), left=len(outcomes) - len(groups)
        )

    async def _commitment(self, window: int, miner: bytes) -> Signed[Commitment] | None:
        """The miner's commitment as storage shows it now; None where it is none."""
        path = paths.commitment(miner, window)
        try:
            data = await self._node.store.get(path, limits.MAX_COMMITMENT_BYTES + limits.MAX_ENVELOPE_BYTES)
            signed = open_signed(data, Commitment, [miner])
            record = signed.record
            if (record.run, record.window, record.miner) != (self._node.run_id, window, miner):
                raise MalformedError("of another run, window or miner", path)
            return signed
        except (NotFoundError, TooLargeError, ProtocolError) as error:
            self._node.telemetry.event("commitment-refused", path=path, error=str(error))
            return None

    async def _fetch(
        self, commitment: Signed[Commitment] | None, decision: Decision, closed: bool
    ) -> HarvestedGroup | str:
        """An accepted group, its bytes checked against the digest that the verdicts name; or why it is not used.

        Raises:
            StoreError: the storage did not answer, or (while the window is open) does not show the batch yet.
        """
        if commitment is None or commitment.digest != decision.commitment:
            return "commitment-changed"
        record = commitment.record
        if decision.index >= len(record.groups) or decision.digest != record.groups[decision.index][0]:
            return "verdict-does-not-fit"  # a validator's word for a group that the miner never promised
        path = paths.batch(record.miner, record.window, record.batch)
        offset, size = record.extent(decision.index)
        try:
            frame = await self._node.store.get(path, size, offset=offset, size=size)
            group = open_group(frame, record, decision.index, self._node.run.group_bytes)
        except NotFoundError:
            if closed:
                return "missing-after-verdict"
            raise
        except ProtocolError:
            return "changed-after-verdict"
        exact = environments.is_exact(self._node.run.environment)
        return harvested(group, decision.digest, decision.accepting, exact=exact) or "verdict-does-not-fit"

    async def _forget(self, before: int) -> None:
        for window in [window for window in self._done if window < before]:
            for miner in self._done.pop(window):
                await self._node.state.delete(COLLECTED + _name(window, miner))
