"""One window's judging: cases side by side, so that a miner whose storage hangs delays nobody, and one at a time at the
engine.
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import trio

from protocol import limits
from protocol.errors import ProtocolError
from protocol.judging.verdict import Reason, Verdict
from roles.first_failure import first_failure
from roles.node.identity import Node
from roles.policy.follower import Follower, VerifiedWeights
from roles.policy.serving import serve
from roles.ports import Engine, EngineError, StoreError
from roles.validator.audit import Auditor, reject_all
from roles.validator.case_queue import CaseQueue, Reputation
from roles.validator.window_cases import Case

_FETCHED_BYTES: Final = 256 * limits.MIB  # of cases that wait for the engine
_FEWEST, _MOST = 8, 64  # cases that are being fetched
_REJECTED = 2  # likewise, of miners that were rejected when they were last judged


class EngineSlot:
    """The place at the engine: one case at a time has it; the next one is who comes first, and needs the same version,
    if any.
    """

    def __init__(self) -> None:
        self._taken = False
        self._version = -1
        self._waiting: list[tuple[Reputation, int, trio.Event]] = []

    @asynccontextmanager
    async def at(self, standing: Reputation, version: int) -> AsyncIterator[None]:
        """Wait for one's turn, and have the place as long as the context lasts."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._taken:
            await self._wait((standing, version, trio.Event()))
        self._taken, self._version = True, version
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, entry: tuple[Reputation, int, trio.Event]) -> None:
        self._waiting.append(entry)
        try:
            await entry[2].wait()
        except trio.Cancelled:
            if entry[2].is_set():
                self._pass_on()
            else:
                self._waiting.remove(entry)
            raise

    def _pass_on(self) -> None:
        self._taken = bool(self._waiting)
        if self._waiting:
            entry = min(self._waiting, key=lambda one: (one[0], one[1] != self._version, -one[1]))
            self._waiting.remove(entry)
            entry[2].set()


class JudgingScheduler:
    """Judges the cases of one window.

    Args:
        window: whose cases.
        version: the newest that serves it, as far as is known; who claims a newer one makes this node look again.
    """

    def __init__(
        self,
        node: Node,
        follower: Follower,
        engine: Engine,
        auditor: Auditor,
        turns: CaseQueue,
        window: int,
        version: int,
    ) -> None:
        self._node = node
        self._follower = follower
        self._engine = engine
        self._auditor = auditor
        self._turns = turns
        self._window = window
        self._serving = version
        self._looked = False
        self._hidden = ""
        self._looking = trio.Lock()
        self._desk = EngineSlot()
        fitting = _FETCHED_BYTES // (node.run.groups * node.run.group_bytes)
        self._places = trio.Semaphore(max(_FEWEST, min(_MOST, fitting)))
        self._last_places = trio.Semaphore(_REJECTED)

    async def judge(self, cases: Iterable[Case], seconds: float) -> list[tuple[Verdict, dict[int, bytes]]]:
        """What is judged within so many seconds, each with the work digests of rejected groups that may be copies.

        Raises:
            EngineError: the engine broke; nothing was judged.
        """
        judged: list[tuple[Verdict, dict[int, bytes]]] = []

        async def judge_one(case: Case, standing: Reputation, places: trio.Semaphore) -> None:
            try:
                judged.append(await self._judge(case, standing))
            except (StoreError, ProtocolError) as error:  # a claim that cannot be looked into is held against nobody
                self._tell(case, str(error))
            except trio.Cancelled:
                self._tell(case, "not judged before its verdict had to be sealed")
                raise
            finally:
                places.release()

        async with first_failure(EngineError) as tasks:
            tasks.cancel_scope.deadline = trio.current_time() + seconds
            for case, standing in self._turns.take(self._window, cases):
                places = self._last_places if standing is Reputation.REJECTED else self._places
                await places.acquire()
                tasks.start_soon(judge_one, case, standing, places)
        return judged

    def _tell(self, case: Case, error: str) -> None:
        self._node.telemetry.event("not-judged", window=self._window, miner=case.miner.hex()[:8], error=error)

    async def _judge(self, case: Case, standing: Reputation) -> tuple[Verdict, dict[int, bytes]]:
        """The verdict on one case.

        Raises:
            StoreError, ProtocolError: storage does not show what is needed, and that is not the miner's fault.
            EngineError: the engine broke.
        """
        node, commitment = self._node, case.commitment.record
        held = await self._acceptable(commitment.version)
        if held is None or len(commitment.groups) > node.run.groups:
            return reject_all(node, case, Reason.VERSION if held is None else Reason.QUOTA), {}
        share = node.run.proof.audit_share(self._turns.clean.get(case.miner, 0))
        history = self._turns.histories.get(case.miner, ())
        known = standing is Reputation.KNOWN
        return await self._auditor.audit(
            case, share, known=known, history=history, at_engine=partial(self._at_engine, standing, held)
        )

    @asynccontextmanager
    async def _at_engine(self, standing: Reputation, held: VerifiedWeights) -> AsyncIterator[None]:
        """Have the engine serve a version to one case alone."""
        async with self._desk.at(standing, held.version):
            began = trio.current_time()
            await serve(self._node, self._engine, held)
            try:
                yield
            finally:
                self._turns.took(standing, trio.current_time() - began)

    async def _acceptable(self, claimed: int) -> VerifiedWeights | None:
        """The weights of a version that may serve the window; None where it may not.

        Raises:
            StoreError, ProtocolError: it may, and cannot be rebuilt; or newer versions, such as it claims, cannot be
                seen now.
        """
        async with self._looking:
            if claimed > self._serving and not self._looked:
                await self._look()
            if claimed > self._serving and self._hidden:
                raise StoreError(self._hidden)
        if not self._serving - self._node.run.schedule.max_lag <= claimed <= self._serving:
            return None
        return await self._follower.hold(claimed)

    async def _look(self) -> None:
        """Look at the chain again, once: miners may know what came out since the last time.

        Raises:
            StoreError, ProtocolError: it cannot be looked at now.
        """
        self._looked, self._hidden = True, "newer versions cannot be seen now"
        await self._follower.refresh()
        self._serving, self._hidden = max(self._serving, self._follower.version_for(self._window)), ""
