"""Judge the cases of one window side by side, so that a miner whose storage hangs delays no other, and one at a time at
the engine, in an order and with shares of the time by which nobody's junk costs others their verdicts.

A miner has one of four reputations, and each has a share of the time at the engine. What one does not use is the
others'. Miners that earn come first, because their groups are trained on; a crowd of strangers, whose groups may look
valid and cost a prefill each, takes no more than its share from them. And miners that fill the window cannot keep
newcomers from becoming known, or known ones from earning. Those that were rejected when they were last judged never
have more than their share.

The second round orders equals at random, so that no miner can be crowded out for good, and all validators judge the
same ones. A case that is not reached has no row in the ledger: the validator abstains.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import partial
from types import MappingProxyType
from typing import Final

import trio

from protocol import limits
from protocol.encoding import content_digest
from protocol.errors import ProtocolError
from protocol.judging.verdict import Reason, Verdict
from roles.gather import first_failure
from roles.node.identity import Node
from roles.policy.follower import Follower
from roles.policy.serving import serve
from roles.policy.verified_weights import VerifiedWeights
from roles.ports import Engine, EngineError, StoreError
from roles.validator.audit import Auditor
from roles.validator.judge import Slots
from roles.validator.ledger_state import Ledger
from roles.validator.window_cases import Case, ServingVersions


class Reputation(IntEnum):
    """What the ledger says of a miner, in the order in which equals are judged."""

    EARNING = 0  # a clean window since its last rejection, and a score
    KNOWN = 1  # a clean window since its last rejection
    STRANGER = 2
    REJECTED = 3

    @property
    def is_known(self) -> bool:
        return self <= Reputation.KNOWN


SHARES: Final[Mapping[Reputation, float]] = MappingProxyType(
    {Reputation.EARNING: 0.6, Reputation.KNOWN: 0.2, Reputation.STRANGER: 0.1, Reputation.REJECTED: 0.1}
)
"""The share of the engine's time that miners of a reputation have if all wait. It is 1 in sum."""


class CaseQueue:
    """The order of one window's cases, by the ledger of this validator."""

    def __init__(self, node: Node, ledger: Ledger, draw: bytes) -> None:
        self._node = node
        self._draw = draw
        self.ledger = ledger
        self.clean_windows = ledger.accounts.clean_windows()  # of each miner since its last rejection
        self.engine_seconds = dict.fromkeys(Reputation, 0.0)  # for how long the engine was busy with cases
        self._rejections = ledger.accounts.rejections()
        self._earning = ledger.earning_miners()

    def reputation(self, miner: bytes) -> Reputation:
        """Return what the ledger says of a miner."""
        if self.clean_windows.get(miner, 0):
            return Reputation.EARNING if miner in self._earning else Reputation.KNOWN
        return Reputation.REJECTED if miner in self._rejections else Reputation.STRANGER

    def in_order(self, cases: Iterable[Case]) -> dict[Reputation, list[Case]]:
        """Return the cases of each reputation, in the order in which they are judged."""
        result: dict[Reputation, list[Case]] = {reputation: [] for reputation in Reputation}
        drawn = sorted(cases, key=lambda case: content_digest(self._draw + case.miner))
        for case in sorted(drawn, key=lambda case: -case.commitment.record.version):
            result[self.reputation(case.miner)].append(case)
        return result

    def has_time(self, window: int, reputation: Reputation) -> bool:
        """Return whether another case of a miner of this reputation may be begun. Work on miners that are not known
        ends a window's length after the second round, and that on rejected ones with their share of this length.
        """
        node, schedule = self._node, self._node.run.schedule
        seconds = schedule.rounds * node.run.beacon.period_ms / 1000
        if reputation is Reputation.REJECTED and self.engine_seconds[reputation] > SHARES[reputation] * seconds:
            return False
        return reputation.is_known or node.clock.now() < node.run.beacon.round_time(schedule.audit(window)) + seconds

    def debt(self, reputation: Reputation) -> float:
        """Return for how long the engine was busy with a reputation's cases, by its share; the least is served next."""
        return self.engine_seconds[reputation] / SHARES[reputation]


_FETCHED_BYTES: Final = 256 * limits.MIB  # of cases that wait for the engine
_FEWEST_FETCHES, _MOST_FETCHES = 8, 64  # cases that are being fetched
_FETCH_SHARES: Final = {  # of them; of strangers one group is fetched first, so that more of them may wait
    Reputation.EARNING: 0.5,
    Reputation.KNOWN: 0.25,
    Reputation.STRANGER: 0.5,
    Reputation.REJECTED: 0.0,
}
_FEWEST_FETCHES_EACH = 2  # of miners of one reputation


class Slot:
    """What works on one case at a time: the engine, the environment, or the continuation of episodes.

    Among the waiting cases the reputation goes first that has had least of its share (`CaseQueue.debt`), the better one
    of equals; then a case of the version that the engine serves already; then the smallest load, and of equals the
    first in the order of the queue. So a case that was begun is completed before later ones are begun, and validators
    complete the same ones; but continuations wait for all that is only prefilled, and those of a miner that misses in
    many rollouts, which cost it nothing, for those of others.
    """

    def __init__(self, debt: Callable[[Reputation], float]) -> None:
        self._debt = debt
        self._busy = False
        self._version = -1
        self._queue: list[tuple[Reputation, int, tuple[int, int], trio.Event]] = []

    @asynccontextmanager
    async def reserve(self, reputation: Reputation, version: int, place: int, load: int) -> AsyncIterator[None]:
        """Wait until the engine is free, and reserve it while the context lasts, by load and the case's place."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._busy:
            is_next = trio.Event()
            entry = (reputation, version, (load, place), is_next)
            self._queue.append(entry)
            try:
                await is_next.wait()
            except trio.Cancelled:
                if is_next.is_set():
                    self._pass_on()
                else:
                    self._queue.remove(entry)
                raise
        self._busy, self._version = True, version
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        self._busy = bool(self._queue)
        if self._queue:
            entry = min(
                self._queue,
                key=lambda item: (self._debt(item[0]), item[0], item[1] != self._version, -item[1], item[2]),
            )
            self._queue.remove(entry)
            entry[3].set()


@dataclass(eq=False)
class JudgingScheduler:
    """Judges the cases of one window, of the versions that may be used in it as far as this node knows. A commitment to
    a newer one makes it refresh; what it finds then makes no version too old.
    """

    node: Node
    follower: Follower
    engine: Engine
    auditor: Auditor
    queue: CaseQueue
    window: int
    versions: ServingVersions

    def __post_init__(self) -> None:
        self._tried_to_refresh = self._is_refreshed = False
        self._refresh_lock = trio.Lock()
        self._slots = [Slot(self.queue.debt) for _ in fields(Slots)]
        fetches = _FETCHED_BYTES // (self.node.run.groups * self.node.run.group_bytes)
        self._fetches = max(_FEWEST_FETCHES, min(_MOST_FETCHES, fetches))

    async def judge(self, cases: Iterable[Case], seconds: float) -> list[tuple[Verdict, dict[int, bytes]]]:
        """Judge cases within so many seconds; return the verdicts, each with the suspected copies (`Auditor.audit`)."""
        verdicts: list[tuple[Verdict, dict[int, bytes]]] = []
        ordered_cases = self.queue.in_order(cases)

        async def judge_one(case: Case, reputation: Reputation, place: int, fetch_limit: trio.Semaphore) -> None:
            try:
                verdicts.append(await self._judge(case, reputation, place))
            except (StoreError, ProtocolError) as error:  # the validator abstains where it cannot check
                self._report(case, str(error))
            except trio.Cancelled:
                self._report(case, "not judged before its verdict had to be sealed")
                raise
            finally:
                fetch_limit.release()

        async def judge_all(reputation: Reputation) -> None:
            fetch_limit = trio.Semaphore(max(_FEWEST_FETCHES_EACH, round(_FETCH_SHARES[reputation] * self._fetches)))
            for place, case in enumerate(ordered_cases[reputation]):
                await fetch_limit.acquire()
                if not self.queue.has_time(self.window, reputation):
                    break
                tasks.start_soon(judge_one, case, reputation, place, fetch_limit)

        start = trio.current_time()
        async with first_failure(EngineError) as tasks:
            tasks.cancel_scope.deadline = start + seconds
            for reputation in Reputation:
                tasks.start_soon(judge_all, reputation)
        seconds = round(trio.current_time() - start, 3)
        judged = {verdict.miner for verdict, _ in verdicts}
        left = {
            f"left_{reputation.name.lower()}": sum(case.miner not in judged for case in left_cases)
            for reputation, left_cases in ordered_cases.items()
        }
        self.node.telemetry.event("judged", window=self.window, cases=len(judged), seconds=seconds, **left)
        return verdicts

    def _report(self, case: Case, error: str) -> None:
        self.node.telemetry.event("not-judged", window=self.window, miner=case.miner.hex()[:8], error=error)

    async def _judge(self, case: Case, reputation: Reputation, place: int) -> tuple[Verdict, dict[int, bytes]]:
        node, commitment = self.node, case.commitment.record
        await self._look_for(commitment.version)
        refusal = self.versions.refusal(commitment.version, was_allowed=case.version_was_allowed)
        if refusal is None and len(commitment.groups) > node.run.groups:
            refusal = Reason.QUOTA
        if refusal is not None:
            return self.auditor.reject_all(case, refusal), {}
        weights = await self.follower.rebuild(commitment.version)
        return await self.auditor.audit(
            case,
            node.run.audit_share(self.queue.clean_windows.get(case.miner, 0), case.submitted_groups),
            is_known=reputation.is_known,
            evidence=self.queue.ledger.accounts.evidence_of(commitment.miner, commitment.arithmetic),
            slots=Slots(*(partial(self._reserve, slot, reputation, weights, place) for slot in self._slots)),
        )

    @asynccontextmanager
    async def _reserve(
        self, slot: Slot, reputation: Reputation, weights: VerifiedWeights, place: int, load: int
    ) -> AsyncIterator[None]:
        """Reserve the engine for one case and have it serve these weights, or the environment, and count its seconds;
        or reserve what uses both by turns.
        """
        async with slot.reserve(reputation, weights.version, place, load):
            start = trio.current_time()
            if slot is self._slots[0]:
                await serve(self.node, self.engine, weights)
            try:
                yield
            finally:
                if slot is not self._slots[-1]:
                    self.queue.engine_seconds[reputation] += trio.current_time() - start

    async def _look_for(self, version: int) -> None:
        """Refresh the chain, once in a window, if a commitment names a version that is newer than all that this node
        knows: miners may have seen one that came out since the last time.
        """
        async with self._refresh_lock:
            if version > self.versions.newest and not self._tried_to_refresh:
                self._tried_to_refresh = True
                await self.follower.refresh()
                newest = max(self.versions.newest, self.follower.version_for(self.window))
                self.versions = ServingVersions(self.versions.oldest, newest)
                self._is_refreshed = True
            if version > self.versions.newest and not self._is_refreshed:
                raise StoreError("newer versions cannot be read now")
