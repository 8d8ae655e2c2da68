"""A meter that keeps the totals of a store's operations, for tests and benches to read."""

from dataclasses import dataclass, field


@dataclass
class Tally:
    """Totals of the operations of one kind with one outcome: how many, payload bytes, seconds."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass
class TallyMeter:
    """Implements StoreMeter.

    Attributes:
        tallies: by operation and outcome.
    """

    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)

    def record(self, operation: str, outcome: str, payload_bytes: int, seconds: float) -> None:
        tally = self.tallies.setdefault((operation, outcome), Tally())
        tally.count += 1
        tally.bytes += payload_bytes
        tally.seconds += seconds
