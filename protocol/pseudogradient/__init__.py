"""What sites that train together send each other (docs/spec/pseudogradient.md). Imports kernels and the patch codec."""

from protocol.pseudogradient.arithmetic import Floats, SquaredNorm, add_contribution, divide, nesterov_step, plain_step
from protocol.pseudogradient.contribution import (
    Contribution,
    ContributionEncoder,
    check_payload,
    decode,
    decode_part,
    encode,
    mean_of,
)
from protocol.pseudogradient.methods import (
    AVERAGING,
    DILOCO,
    PULSELOCO_EXACT,
    PULSELOCO_GRID,
    SPARSELOCO,
    Method,
)
from protocol.pseudogradient.parts import Part, parts_of, streams_of
from protocol.pseudogradient.payload import Coding, Head, Kind, read_head, write_head
from protocol.pseudogradient.sparse_encoding import Inputs

__all__ = [
    "AVERAGING",
    "DILOCO",
    "PULSELOCO_EXACT",
    "PULSELOCO_GRID",
    "SPARSELOCO",
    "Coding",
    "Contribution",
    "ContributionEncoder",
    "Floats",
    "Head",
    "Inputs",
    "Kind",
    "Method",
    "Part",
    "SquaredNorm",
    "add_contribution",
    "check_payload",
    "decode",
    "decode_part",
    "divide",
    "encode",
    "mean_of",
    "nesterov_step",
    "parts_of",
    "plain_step",
    "read_head",
    "streams_of",
    "write_head",
]
