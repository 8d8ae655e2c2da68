"""The methods that `bench.outer` compares: those of protocol/pseudogradient, and variations of them."""

from dataclasses import dataclass, replace
from math import ceil
from typing import Final, Literal

from protocol.outer.round_records import RoundRules
from protocol.pseudogradient import AVERAGING, DILOCO, PULSELOCO_EXACT, PULSELOCO_GRID, SPARSELOCO, Coding, Kind, Method

DENSE: Final = Coding(Kind.DENSE)
_VALUES: Final[dict[Kind, Literal["dense", "exact", "grid", "chunked"]]] = {
    Kind.DENSE: "dense",
    Kind.EXACT: "exact",
    Kind.GRID: "grid",
    Kind.CHUNKED: "chunked",
}


@dataclass(frozen=True)
class Variant:
    """A method as a trial uses it.

    Attributes:
        method: coding, error feedback and outer step.
        delay: rounds that a site goes on with before it has the result of a round; 0 or 1.
        value_bits: bits of a chunked value, where they are not the format's 2; 32 for values as they are. The bench
            quantizes such values itself, and counts their bits.
        streams: into how many parts the tensors are divided, one of which is sent in each round.
    """

    method: Method
    delay: int = 0
    value_bits: int | None = None
    streams: int = 1

    def rules(self, local_steps: int, rounds: int) -> RoundRules:
        """Return the rules that a round manifest would give."""
        method = self.method
        return RoundRules(
            values=_VALUES[method.coding.kind],
            fraction=method.coding.fraction,
            chosen=method.coding.chosen,
            feedback_decay=method.feedback_decay,
            frozen_steps=ceil(method.frozen_share * rounds),
            momentum=method.momentum,
            outer_rate=method.outer_rate,
            local_steps=local_steps,
            quorum=1,
            delay=self.delay,
            streams=self.streams,
            spread=0,
        )


def _grid(fraction: int) -> Method:
    return replace(PULSELOCO_GRID, coding=Coding(Kind.GRID, fraction=fraction))


def _sparse(chosen: int) -> Method:
    return replace(SPARSELOCO, coding=Coding(Kind.CHUNKED, chosen=chosen))


VARIANTS: Final = {
    "ddp": Variant(AVERAGING),  # a trial of DDP takes the mean of gradients instead: it makes no outer step
    "diloco": Variant(DILOCO),
    "exact": Variant(PULSELOCO_EXACT),
    "grid": Variant(PULSELOCO_GRID),
    "sparse-32": Variant(_sparse(32)),
    "sparse-128": Variant(_sparse(128)),
    "averaging": Variant(AVERAGING),
    "diloco, delay 1": Variant(DILOCO, delay=1),
    "grid, delay 1": Variant(PULSELOCO_GRID, delay=1),
    "grid, no feedback": Variant(replace(PULSELOCO_GRID, feedback_decay=0.0)),
    "grid, f = 0": Variant(_grid(0)),
    "grid, f = 1": Variant(_grid(1)),
    "sparse-128, no feedback": Variant(replace(SPARSELOCO, feedback_decay=0.0)),
    "sparse-128, 3 streams": Variant(SPARSELOCO, streams=3),
    "sparse-128, momentum": Variant(replace(SPARSELOCO, momentum=0.9, outer_rate=0.7)),
    "sparse-128, 1 bit": Variant(SPARSELOCO, value_bits=1),
    "sparse-128, 3 bits": Variant(SPARSELOCO, value_bits=3),
    "sparse-128, FP32 values": Variant(SPARSELOCO, value_bits=32),
}
"""By name. The first six are the methods that the papers compare."""
