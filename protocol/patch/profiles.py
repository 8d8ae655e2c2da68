"""Which profile to publish with: the one that reaches the followers first (PULSE, appendix H.4.5, equation 26)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

PROFILES: Final = ("compact", "fast")
"""How a patch can be made; "auto" is one of these, picked for the Conditions at hand."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a profile was measured at.

    Attributes:
        encode: bytes of weights a second, on this machine.
        apply: bytes of weights a second, on a follower.
        ratio: bytes of patch for each byte of weights.
    """

    encode: float
    apply: float
    ratio: float

    def seconds(self, weight_bytes: int, link: float) -> float:
        """Encoding, transfer over a link of `link` bytes a second, and application, one after the other."""
        return weight_bytes * (1 / self.encode + self.ratio / link + 1 / self.apply)


@dataclass(frozen=True, slots=True)
class LinkConditions:
    """What "auto" goes by.

    Attributes:
        link: bytes a second, as measured; None before anything was.
        rates: of each profile, as measured on the last patches; a profile without any is tried.
    """

    link: float | None = None
    rates: Mapping[str, Rates] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProfileChoice:
    """A profile, and why."""

    profile: str
    reason: str


def choose_profile(weight_bytes: int, conditions: LinkConditions) -> ProfileChoice:
    """The profile with the least encode + transfer + apply time.

    Args:
        weight_bytes: bytes of the full weights.

    Raises:
        ValueError: a link that carries nothing.
    """
    link, rates = conditions.link, conditions.rates
    for profile in PROFILES:
        if profile not in rates:
            return ProfileChoice(profile, f"{profile} has not been measured yet")
    if link is None:
        return ProfileChoice("compact", "no transfer has been measured yet")
    if link <= 0:
        raise ValueError("a link that carries nothing")
    seconds = {profile: rates[profile].seconds(weight_bytes, link) for profile in PROFILES}
    best = min(PROFILES, key=lambda profile: seconds[profile])
    times = ", ".join(f"{profile} {seconds[profile]:.3g} s" for profile in PROFILES)
    return ProfileChoice(best, f"encode + transfer at {link * 8 / 1e6:.3g} Mbit/s + apply: {times}")


def pick_profile(profile: str, weight_bytes: int, conditions: LinkConditions | None) -> ProfileChoice:
    """A profile by name; "auto" as `choose_profile` does.

    Raises:
        ValueError: no such profile, or "auto" without Conditions.
    """
    if profile == "auto":
        if conditions is None:
            raise ValueError("the auto profile needs Conditions: the link's rate and the codec's")
        return choose_profile(weight_bytes, conditions)
    if profile not in PROFILES:
        raise ValueError(f"no profile {profile!r}: {', '.join(PROFILES)} or auto")
    return ProfileChoice(profile, "as configured")
