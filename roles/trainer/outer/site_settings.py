"""The settings of a site."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SiteSettings:
    """What a site's operator sets.

    Attributes:
        groups_per_step: groups of one local step.
        max_staleness: versions behind the newest; older groups are not used.
        upload_seconds: how long before the round closes the site stops its local steps.
        poll_seconds: how often it looks for groups and for the next round manifest.
    """

    groups_per_step: int
    max_staleness: int = 8
    upload_seconds: float = 5.0
    poll_seconds: float = 0.5
