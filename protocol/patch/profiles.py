"""Which profile to publish with: the one that reaches the followers first (PULSE, appendix H.4.5, equation 26)."""

from collections.abc import Mapping
from dataclasses import dataclass


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
class Choice:
    """A profile, and why."""

    profile: str
    reason: str


def choose_profile(weight_bytes: int, link: float, rates: Mapping[str, Rates]) -> Choice:
    """The profile with the least encode + transfer + apply time.

    Args:
        weight_bytes: bytes of the full weights.
        link: bytes a second, as measured.
        rates: of each profile, as measured on the last patches.

    Raises:
        ValueError: no rates, or a link that carries nothing.
    """
    if not rates or link <= 0:
        raise ValueError("rates and a link that carries something")
    seconds = {profile: rate.seconds(weight_bytes, link) for profile, rate in rates.items()}
    best = min(seconds, key=lambda profile: (seconds[profile], profile))
    times = ", ".join(f"{profile} {seconds[profile]:.2f} s" for profile in sorted(seconds))
    return Choice(best, f"encode + transfer at {link * 8 / 1e6:.0f} Mbit/s + apply: {times}")
