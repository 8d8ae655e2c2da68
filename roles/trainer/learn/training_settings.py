"""The constants of the training process, which are keys of [trainer]; this module imports no torch."""

from typing import Final

from pydantic import Field

from roles.settings_base import Settings
from roles.trainer.learn.optimizer_settings import OptimizerSettings

LARGE_MODEL: Final = 100_000_000
"""Parameters from which on a trainer saves memory and disk at the cost of time, unless run.toml says otherwise."""


class TrainingSettings(OptimizerSettings):
    """The optimizer, and when the training loop takes a step, publishes a version, and writes a checkpoint."""

    groups_per_step: int = Field(default=16, ge=1)
    """Groups of one optimizer step; the loop waits until there are as many."""
    steps_per_version: int = Field(default=1, ge=1)
    """Optimizer steps between two published versions."""
    checkpoint_versions: int = Field(default=0, ge=0)
    """Versions from one checkpoint to the next; 0: 1 with fewer than 100 million parameters, 20 with more. The first
    version has one, and so has the last.
    """
    checkpoint_seconds: float = Field(default=0.0, ge=0)
    """Seconds after which the next version has a checkpoint anyhow; 0 for never."""
    file_bytes: int = Field(default=1 << 25, ge=1 << 12, le=1 << 30)
    """Most bytes of weights in one file of a full checkpoint, or of a site's payload, in storage, or of one larger
    tensor; parts of a patch have about an eighth. Several hosts divide the files among them.
    """


class ReplaySettings(Settings):
    """Bounds of the replay buffer."""

    max_uses: int = Field(default=1, ge=1)
    """Times that a group is trained on."""
    decay: float = Field(default=0.7, gt=0, le=1)
    """Weight of a group for each version that it is behind."""
    max_staleness: int = Field(default=16, ge=0)
    """Versions behind the newest after which a group is dropped."""
    replay_bytes: int = Field(default=1 << 30, ge=1)
    """Bytes of memory of all groups together."""
    dynamic_filtering: bool = True
    """Refuse groups whose rewards do not differ (DAPO): they have no advantage, and only take places in a step."""

    @property
    def filters_groups(self) -> bool:
        """Whether groups whose rewards do not differ are left out."""
        return self.dynamic_filtering
