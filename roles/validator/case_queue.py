"""Whose case is judged first, and whose only if there is time: junk must not cost honest miners their verdicts.

Known miners (a clean window, and no rejection since) come first, strangers after them, and who was rejected last comes
at the end, on a tenth of a window's time. Among equals the second round draws, so that nobody can be crowded out for
good. A case that is
not reached has no row in the ledger: the validator abstains.
"""

from collections.abc import Iterable, Iterator
from enum import IntEnum

from protocol.digest import content_digest
from roles.node.identity import Node
from roles.validator.ledger_state import Ledger
from roles.validator.window_cases import Case

REJECTED_SHARE = 0.1  # of a window's seconds, for those who were rejected when they were last judged


class Reputation(IntEnum):
    """What the ledger says of a miner, in the order in which they are judged."""

    KNOWN = 0
    STRANGER = 1
    REJECTED = 2


class CaseQueue:
    """The order of one window's cases."""

    def __init__(self, node: Node, ledger: Ledger, draw: bytes) -> None:
        self._node = node
        self._draw = draw
        self.clean = ledger.clean_windows()
        """Clean windows of each miner since its last rejection."""
        self.histories = ledger.histories()
        """What each miner's windows since its last rejection showed."""
        self._rejected = ledger.rejections()
        self._spent = 0.0

    def standing(self, miner: bytes) -> Reputation:
        """What the ledger says of a miner."""
        if self.clean.get(miner, 0):
            return Reputation.KNOWN
        return Reputation.REJECTED if miner in self._rejected else Reputation.STRANGER

    def take(self, window: int, cases: Iterable[Case]) -> Iterator[tuple[Case, Reputation]]:
        """The cases in order, as long as there is time for them."""
        clock, schedule = self._node.clock, self._node.run.schedule
        seconds = schedule.rounds * self._node.run.beacon.period_ms / 1000
        end = self._node.run.beacon.due(schedule.audit(window)) + seconds
        for standing, case in sorted(((self.standing(case.miner), case) for case in cases), key=self._rank):
            if (standing is not Reputation.KNOWN and clock.now() >= end) or self._spent > REJECTED_SHARE * seconds:
                self._node.telemetry.event("not-judged", window=window, miner=case.miner.hex()[:8])
                continue
            yield case, standing

    def took(self, standing: Reputation, seconds: float) -> None:
        """The engine was busy for so long with somebody of this standing."""
        if standing is Reputation.REJECTED:
            self._spent += seconds

    def _rank(self, item: tuple[Reputation, Case]) -> tuple[int, int, bytes]:
        standing, case = item
        return standing, -case.commitment.record.version, content_digest(self._draw + case.miner)
