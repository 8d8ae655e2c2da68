"""The choice of the profile that reaches the followers first (PULSE, appendix H.4.5, equation 26)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

PROFILES: Final = ("compact", "fast")
"""The profiles of a patch. "auto" selects one of them by `LinkConditions`."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The measured rates of a profile.

    Attributes:
        encode: speed of encoding on this machine, in bytes of weights per second.
        apply: speed of application on a follower, in bytes of weights per second.
        ratio: bytes of patch per byte of weights.
    """

    encode: float
    apply: float
    ratio: float

    def seconds(self, weight_bytes: int, link: float) -> float:
        """Return the total time of encoding, transfer and application, in seconds.

        Args:
            weight_bytes: bytes of the full weights.
            link: speed of the transfer, in bytes per second.
        """
        return weight_bytes * (1 / self.encode + self.ratio / link + 1 / self.apply)


@dataclass(frozen=True, slots=True)
class LinkConditions:
    """The measurements by which "auto" selects a profile.

    Attributes:
        link: speed of the transfer, in bytes per second; None before the first measurement.
        rates: by profile, measured on the last patches; a profile without rates is tried first.
    """

    link: float | None = None
    rates: Mapping[str, Rates] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProfileChoice:
    """A profile, and the reason for its choice."""

    profile: str
    reason: str


def choose_profile(weight_bytes: int, conditions: LinkConditions) -> ProfileChoice:
    """Choose the profile with the least time for encoding, transfer and application.

    Args:
        weight_bytes: bytes of the full weights.

    Raises:
        ValueError: the speed of the transfer is not positive.
    """
    link, rates = conditions.link, conditions.rates
    for profile in PROFILES:
        if profile not in rates:
            return ProfileChoice(profile, f"{profile} has not been measured yet")
    if link is None:
        return ProfileChoice("compact", "no transfer has been measured yet")
    if link <= 0:
        raise ValueError(f"the link's rate must be positive, not {link} bytes/s")
    seconds = {profile: rates[profile].seconds(weight_bytes, link) for profile in PROFILES}
    best = min(PROFILES, key=lambda profile: seconds[profile])
    times = ", ".join(f"{profile} {seconds[profile]:.3g} s" for profile in PROFILES)
    return ProfileChoice(best, f"encode + transfer at {link * 8 / 1e6:.3g} Mbit/s + apply: {times}")


def pick_profile(profile: str, weight_bytes: int, conditions: LinkConditions | None) -> ProfileChoice:
    """Return a profile by name, or choose one for "auto".

    Args:
        weight_bytes: bytes of the full weights.

    Raises:
        ValueError: there is no such profile, or "auto" has no conditions.
    """
    if profile == "auto":
        if conditions is None:
            raise ValueError("the auto profile needs conditions: the rates of the link and of the codec")
        return choose_profile(weight_bytes, conditions)
    if profile not in PROFILES:
        raise ValueError(f"no profile {profile!r}: {', '.join(PROFILES)} or auto")
    return ProfileChoice(profile, "as configured")
