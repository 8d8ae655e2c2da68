"""What a miner's operator decides: the section [miner] of run.toml."""

from pydantic import Field

from roles.settings_base import Settings


class MinerSettings(Settings):
    """How many groups a miner delivers, and how it works on them."""

    groups: int = Field(default=16, ge=1)
    """Groups to aim for in a window, at most what the run allows."""
    chunk: int = Field(default=8, ge=1)
    """Groups generated at a time; the clock is read after each chunk."""
    share: float = Field(default=0.8, gt=0, le=1)
    """The part of the time to the deadline that generating may take; the rest is for the upload."""
    poll_seconds: float = Field(default=0.2, gt=0)
    """Seconds between two looks for a newer version; a 40th of a window where that is longer."""
