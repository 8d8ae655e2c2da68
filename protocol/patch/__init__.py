"""Weight patches: from one version of the weights to the next, bit for bit (docs/spec/patch.md)."""

from protocol.patch.codec import (
    Applied,
    Encoded,
    PatchSummary,
    apply,
    apply_in_place,
    apply_with_digests,
    encode,
    encode_with_digests,
    invert,
    squash,
    summary,
)
from protocol.patch.container import Mode, Row

__all__ = [
    "Applied",
    "Encoded",
    "Mode",
    "PatchSummary",
    "Row",
    "apply",
    "apply_in_place",
    "apply_with_digests",
    "encode",
    "encode_with_digests",
    "invert",
    "squash",
    "summary",
]
