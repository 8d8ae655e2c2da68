"""What the `auto` profile goes by, measured on the versions that this trainer publishes.

The codec's rates are those of the last patch of each profile, the link's that of the last uploads. A profile that has
not been
used for a while is forgotten, and so measured again: what the policy's updates look like changes as it learns.
"""

from dataclasses import dataclass
from typing import Final

from protocol.patch import LinkConditions, Rates

FORGET_AFTER: Final = 50
"""Patches after which the rates of a profile that was not picked are forgotten."""

_SHARE_KEPT: Final = 0.8  # of what older uploads count for, at each new one
_LEAST_SECONDS: Final = 1e-6  # a clock may not have moved


@dataclass(frozen=True)
class PatchMeasurement:
    """One patch: sizes in bytes, and the seconds that encoding and applying it took."""

    profile: str
    weight_bytes: int
    patch_bytes: int
    encode_seconds: float
    apply_seconds: float


class RateMeter:
    """Measurements of one trainer's publishing.

    Args:
        link: bytes a second that the followers' links carry, where the operator knows; None: as this node's uploads go.
    """

    def __init__(self, link: float | None) -> None:
        self._known_link = link
        self._bytes = self._seconds = 0.0
        self._patches = 0
        self._rates: dict[str, tuple[int, Rates]] = {}

    def made(self, made: PatchMeasurement) -> None:
        """A patch was encoded and applied."""
        self._patches += 1
        rates = Rates(
            made.weight_bytes / max(made.encode_seconds, _LEAST_SECONDS),
            made.weight_bytes / max(made.apply_seconds, _LEAST_SECONDS),
            made.patch_bytes / made.weight_bytes,
        )
        self._rates[made.profile] = (self._patches, rates)

    def sent(self, nbytes: int, seconds: float) -> None:
        """An upload of `nbytes` took so long."""
        self._bytes = _SHARE_KEPT * self._bytes + nbytes
        self._seconds = _SHARE_KEPT * self._seconds + max(seconds, _LEAST_SECONDS)

    def conditions(self) -> LinkConditions:
        """What was measured so far."""
        measured = self._bytes / self._seconds if self._seconds else None
        recent = {name: rates for name, (at, rates) in self._rates.items() if self._patches - at < FORGET_AFTER}
        return LinkConditions(self._known_link or measured, recent)
