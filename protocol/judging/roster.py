"""The roster of a window: the validators among which R1 deals the groups (docs/spec/window.md). No I/O.

Every group is dealt to `quorum` + `spares` of the roster. A miner commits before R1 is out, so it cannot know who will
judge a group, and no validator can choose what it judges.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from protocol.rollout import challenge
from protocol.window import Schedule

PRESENCE_WINDOWS: Final = 3
"""The windows that show which validators are present."""


@dataclass(frozen=True)
class Roster:
    """The validators among which the groups of a window are dealt."""

    validators: tuple[bytes, ...]
    judges: int

    @classmethod
    def of(cls, validators: Collection[bytes], present: Iterable[bytes], quorum: int, spares: int) -> "Roster":
        """Return the roster of the validators that judged of late; of all if these are fewer than the quorum."""
        members = set(present).intersection(validators)
        if len(members) < quorum:
            members = set(validators)
        return cls(tuple(sorted(members)), quorum + spares)

    def joined_by(self, validator: bytes) -> "Roster":
        """Return this roster with one more validator, which shows by judging that it is present (again)."""
        return Roster(tuple(sorted({*self.validators, validator})), self.judges)

    @property
    def scale(self) -> tuple[int, int]:
        """How many groups one that is dealt to a validator stands for, as a fraction: at least 1."""
        return max(len(self.validators), self.judges), self.judges

    def judges_of(self, run: bytes, window: int, randomness: bytes, miner: bytes, group: int) -> frozenset[bytes]:
        """Return the validators to which a group is dealt by the randomness of the window's round R1."""
        if self.judges >= len(self.validators):
            return frozenset(self.validators)
        return frozenset(challenge.deal_order(run, window, randomness, miner, group, self.validators)[: self.judges])

    def dealt_groups(
        self, run: bytes, window: int, randomness: bytes, miner: bytes, *, groups: int, validator: bytes
    ) -> tuple[int, ...]:
        """Return the indices of a miner's groups, as many as count, that are dealt to one validator, ascending, by the
        randomness of the window's round R1.
        """
        return tuple(
            group for group in range(groups) if validator in self.judges_of(run, window, randomness, miner, group)
        )


def presence_windows(schedule: Schedule, window: int) -> range:
    """Return the windows whose summaries show who is present in a window: the newest ones of which nobody waits for
    verdicts any more when the window opens. None at the beginning of a run, when there are not enough of them.
    """
    newest = window - -(-schedule.verdict_rounds // schedule.rounds)
    first = newest + 1 - PRESENCE_WINDOWS
    return range(first, newest + 1) if first >= 0 else range(0)
