"""Window arithmetic (docs/spec/window.md): which window a beacon round belongs to, and the rounds inside a window.

Window w opens with round R0(w); commitments must be in storage before the round of the deadline; round R1(w), later
than the deadline, selects the groups to audit. All arithmetic is in whole rounds, so that every node computes the same.
"""

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from protocol.encoding import Record

Round = Annotated[int, Field(ge=1, lt=1 << 53)]


class Schedule(Record):
    """The schedule of windows in beacon rounds (fields: docs/spec/window.md)."""

    kind: ClassVar[str] = "schedule"
    first_round: Round
    rounds: Annotated[int, Field(ge=3, le=1 << 20)]
    commit_rounds: Annotated[int, Field(ge=1, le=1 << 20)]
    audit_rounds: Annotated[int, Field(ge=2, le=1 << 20)]
    seal_rounds: Annotated[int, Field(ge=3, le=1 << 24)]
    verdict_rounds: Annotated[int, Field(ge=4, le=1 << 24)]
    lead: Annotated[int, Field(ge=1, le=1024)]
    max_lag: Annotated[int, Field(ge=0, le=1024)]

    @model_validator(mode="after")
    def _in_order(self) -> "Schedule":
        if not self.commit_rounds < self.audit_rounds < self.seal_rounds < self.verdict_rounds:
            raise ValueError("commit_rounds < audit_rounds < seal_rounds < verdict_rounds must hold")
        if self.audit_rounds > self.rounds:
            raise ValueError("audit_rounds must lie within the window")
        return self

    def opening(self, window: int) -> int:
        """Return the round R0 that opens a window."""
        return self.first_round + window * self.rounds

    def pledges(self, window: int) -> int:
        """Return the round from which validators read the pledges for a window: R1 of the window before, as a rule."""
        return self.opening(window) - max(1, self.rounds - self.audit_rounds)

    def deadline(self, window: int) -> int:
        """Return the round by whose time commitments must be in storage."""
        return self.opening(window) + self.commit_rounds

    def audit(self, window: int) -> int:
        """Return the round R1 that selects the groups to audit."""
        return self.opening(window) + self.audit_rounds

    def seal(self, window: int) -> int:
        """Return the round after which no seal counts and every validator that sealed reveals its summary."""
        return self.opening(window) + self.seal_rounds

    def verdict(self, window: int) -> int:
        """Return the round after which nobody waits for verdicts on a window."""
        return self.opening(window) + self.verdict_rounds

    def window_at(self, round_number: int) -> int:
        """Return the window that contains a round; negative before window 0."""
        return (round_number - self.first_round) // self.rounds
