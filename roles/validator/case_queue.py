"""The order in which a window's cases are judged, so that junk does not cost honest miners their verdicts.

Known miners (a clean window, and no rejection since) come first, strangers after them. Miners that were rejected when
they were last judged come at the end, and get a tenth of a window's time. The second round orders equals at random, so
that no miner can be crowded out for good. A case that is not reached has no row in the ledger: the validator abstains.
"""

from collections.abc import Iterable, Iterator
from enum import IntEnum

from protocol.digest import content_digest
from roles.node.identity import Node
from roles.validator.ledger_state import Ledger
from roles.validator.window_cases import Case

REJECTED_SHARE = 0.1  # of a window's seconds, for miners that were rejected when they were last judged


class Reputation(IntEnum):
    """What the ledger says of a miner, in the order in which miners are judged."""

    KNOWN = 0
    STRANGER = 1
    REJECTED = 2


class CaseQueue:
    """The order of one window's cases.

    Attributes:
        clean_windows: clean windows of each miner since its last rejection.
        histories: the counts of each miner's accepted groups by window.
    """

    def __init__(self, node: Node, ledger: Ledger, draw: bytes) -> None:
        self._node = node
        self._draw = draw
        self.clean_windows = ledger.clean_windows()
        self.histories = ledger.histories()
        self._rejections = ledger.rejections()
        self._rejected_seconds = 0.0

    def reputation(self, miner: bytes) -> Reputation:
        """Return what the ledger says of a miner."""
        if self.clean_windows.get(miner, 0):
            return Reputation.KNOWN
        return Reputation.REJECTED if miner in self._rejections else Reputation.STRANGER

    def cases_in_order(self, window: int, cases: Iterable[Case]) -> Iterator[tuple[Case, Reputation]]:
        """Yield the cases in order, as long as there is time for them."""
        clock, schedule = self._node.clock, self._node.run.schedule
        seconds = schedule.rounds * self._node.run.beacon.period_ms / 1000
        end = self._node.run.beacon.round_time(schedule.audit(window)) + seconds
        for reputation, case in sorted(((self.reputation(case.miner), case) for case in cases), key=self._rank):
            late = reputation is not Reputation.KNOWN and clock.now() >= end
            if late or self._rejected_seconds > REJECTED_SHARE * seconds:
                self._node.telemetry.event("not-judged", window=window, miner=case.miner.hex()[:8])
                continue
            yield case, reputation

    def add_engine_time(self, reputation: Reputation, seconds: float) -> None:
        """Add the seconds for which the engine was busy with a case of a miner of this reputation."""
        if reputation is Reputation.REJECTED:
            self._rejected_seconds += seconds

    def _rank(self, item: tuple[Reputation, Case]) -> tuple[int, int, bytes]:
        reputation, case = item
        return reputation, -case.commitment.record.version, content_digest(self._draw + case.miner)
