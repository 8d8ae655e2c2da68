"""Weight patches: from one version of the weights to the next, bit for bit (docs/spec/patch.md)."""

from protocol.patch.applying import (
    Applied,
    apply,
    apply_in_place,
    apply_in_place_with_digests,
    apply_with_digests,
)
from protocol.patch.codec import Digests, Encoded, PatchSummary, encode, encode_with_digests, summary
from protocol.patch.composition import invert, squash
from protocol.patch.container import Mode, Row
from protocol.patch.partial import StreamingApply, apply_rows, apply_tensors, row_edges
from protocol.patch.profiles import PROFILES, Choice, Conditions, Rates, choose_profile
from protocol.patch.sparse import warm_up

__all__ = [
    "PROFILES",
    "Applied",
    "Choice",
    "Conditions",
    "Digests",
    "Encoded",
    "Mode",
    "PatchSummary",
    "Rates",
    "Row",
    "StreamingApply",
    "apply",
    "apply_in_place",
    "apply_in_place_with_digests",
    "apply_rows",
    "apply_tensors",
    "apply_with_digests",
    "choose_profile",
    "encode",
    "encode_with_digests",
    "invert",
    "row_edges",
    "squash",
    "summary",
    "warm_up",
]
