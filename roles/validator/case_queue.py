"""The order in which a window's cases are judged, and how the validator's time is shared, so that nobody's junk costs
others their verdicts.

A miner has one of four reputations, and each has a share of the time at the engine. What one does not use is the
others'. Miners that earn come first, because their groups are trained on; a crowd of strangers, whose groups may look
valid and cost a prefill each, takes no more than its share from them. And miners that fill the window cannot keep
newcomers from becoming known, or known ones from earning. Those that were rejected when they were last judged never
have more than their share.

The second round orders equals at random, so that no miner can be crowded out for good, and all validators judge the
same ones. A case that is not reached has no row in the ledger: the validator abstains.
"""

from collections.abc import Iterable, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Final

from protocol.encoding import content_digest
from roles.node.identity import Node
from roles.validator.ledger_state import Ledger
from roles.validator.window_cases import Case


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
