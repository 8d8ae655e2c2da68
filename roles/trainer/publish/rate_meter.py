"""Measurements for the choice of the `auto` profile, taken on the versions that this trainer publishes.

The codec's rates are those of the last patch of each profile, the link's rate is that of the last uploads. The rates of
a profile that has not been used for a while are forgotten, so that it is measured again: the policy's updates change as
it learns.
"""

from dataclasses import dataclass
from typing import Final

from protocol.patch import LinkConditions, Rates

FORGET_AFTER: Final = 50
"""Patches after which the rates of a profile that was not picked are forgotten."""

_UPLOAD_DECAY: Final = 0.8  # the weight of all older uploads falls to this share at each new one
_MIN_SECONDS: Final = 1e-6  # two readings of a clock may be equal


@dataclass(frozen=True)
class PatchMeasurement:
    """The sizes in bytes of one patch and its weights, and the seconds that encoding and applying it took."""

    profile: str
    weight_bytes: int
    patch_bytes: int
    encode_seconds: float
    apply_seconds: float


class RateMeter:
    """The measurements of one trainer's publisher.

    Args:
        link_rate: bytes a second of the followers' links, if the operator knows; None: the rate of this node's uploads.
    """

    def __init__(self, link_rate: float | None) -> None:
        self._link_rate = link_rate
        self._bytes = self._seconds = 0.0
        self._patches = 0
        self._rates: dict[str, tuple[int, Rates]] = {}  # by profile: the number of its last patch, and its rates

    def add_patch(self, measurement: PatchMeasurement) -> None:
        """Add the measurement of a patch that was encoded and applied."""
        self._patches += 1
        rates = Rates(
            measurement.weight_bytes / max(measurement.encode_seconds, _MIN_SECONDS),
            measurement.weight_bytes / max(measurement.apply_seconds, _MIN_SECONDS),
            measurement.patch_bytes / measurement.weight_bytes,
        )
        self._rates[measurement.profile] = (self._patches, rates)

    def add_upload(self, nbytes: int, seconds: float) -> None:
        """Add an upload of `nbytes` bytes that took `seconds`."""
        self._bytes = _UPLOAD_DECAY * self._bytes + nbytes
        self._seconds = _UPLOAD_DECAY * self._seconds + max(seconds, _MIN_SECONDS)

    def conditions(self) -> LinkConditions:
        """Return the link's rate and each profile's recent rates."""
        upload_rate = self._bytes / self._seconds if self._seconds else None
        recent = {
            profile: rates for profile, (number, rates) in self._rates.items() if self._patches - number < FORGET_AFTER
        }
        return LinkConditions(self._link_rate or upload_rate, recent)
