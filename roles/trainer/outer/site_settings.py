"""The settings of a site."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SiteSettings:
    """What a site's operator sets."""

    groups_per_step: int  # of one local step
    max_staleness: int = 8  # versions behind the newest; older groups are not used
    dynamic_filtering: bool = True  # whether groups whose rewards do not differ are not used
    upload_seconds: float = 5.0  # how long before the round closes the site stops its local steps
    threads: int = 1  # that apply the contributions of a round
    poll_seconds: float = 0.5  # between two looks for groups and for the next round manifest
