"""What sites that train together send each other, and the methods by which they train (docs/spec/pseudogradient.md).

Imports kernels and the patch codec.
"""

from dataclasses import dataclass
from typing import Final

from protocol.pseudogradient.arithmetic import Floats, SquaredNorm, nesterov_step, plain_step
from protocol.pseudogradient.contribution import Contribution, ContributionDecoder, Keep, decode, encode, in_memory
from protocol.pseudogradient.parts import Part, parts_of, streams_of
from protocol.pseudogradient.payload import Coding, File, Head, Kind, Payload, read_head, write_head
from protocol.pseudogradient.sparse_encoding import Inputs

__all__ = [
    "AVERAGING",
    "DILOCO",
    "PULSELOCO_EXACT",
    "PULSELOCO_GRID",
    "SPARSELOCO",
    "Coding",
    "Contribution",
    "ContributionDecoder",
    "File",
    "Head",
    "Inputs",
    "Keep",
    "Kind",
    "Method",
    "Part",
    "Payload",
    "SquaredNorm",
    "decode",
    "encode",
    "in_memory",
    "parts_of",
    "read_head",
    "streams_of",
    "write_head",
]


@dataclass(frozen=True, slots=True)
class Method:
    """How sites train together."""

    coding: Coding  # of a contribution's values
    feedback_decay: float = 0.0  # factor of the error feedback; 0 if there is none
    momentum: float = 0.0  # of the outer Nesterov optimizer; 0 for plain averaging
    outer_rate: float = 1.0  # outer learning rate
    frozen_share: float = 0.0  # share of a run's rounds, at its beginning, in which the error feedback stays zero

    def step(self, base: Floats, momentum: Floats, mean: Floats) -> None:
        """Make the outer step of one part in place; without outer momentum, `momentum` stays as it is."""
        if self.momentum:
            nesterov_step(base, momentum, mean, decay=self.momentum, rate=self.outer_rate)
        else:
            plain_step(base, mean, rate=self.outer_rate)


# The momentum and the rate that DiLoCo was published with; PULSELoCo keeps them.
DILOCO: Final = Method(Coding(Kind.DENSE), momentum=0.9, outer_rate=0.7)
AVERAGING: Final = Method(Coding(Kind.DENSE))
PULSELOCO_EXACT: Final = Method(Coding(Kind.EXACT), feedback_decay=1.0, momentum=0.9, outer_rate=0.7)
PULSELOCO_GRID: Final = Method(Coding(Kind.GRID, fraction=3), feedback_decay=1.0, momentum=0.9, outer_rate=0.7)
# SparseLoCo sends 3% of the entries, 128 of 4096, and begins with error feedback after a twentieth of the run.
SPARSELOCO: Final = Method(Coding(Kind.CHUNKED, chosen=128), feedback_decay=0.95, frozen_share=0.05)
