"""The constants of the training process, which are keys of [trainer]; this module imports no torch.

The learning rate rises linearly over a warm-up. Then it is constant, or comes down along half a cosine or a line.
"""

import math
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from roles.settings_base import Settings

OptimizerName = Literal["adamw", "adamw-8bit", "muon"]
ScheduleName = Literal["constant", "cosine", "linear"]


class OptimizerSettings(Settings):
    """The constants of an optimizer. AdamW changes a weight by at most about 1.4 times the learning rate in a step."""

    training_steps: int = Field(default=0, ge=0)
    """Optimizer steps after which training ends; 0 for no end."""
    optimizer: OptimizerName = "adamw"
    """AdamW of torch; adamw-8bit: that of bitsandbytes, with moments of a byte; muon: Muon of torch for the matrices of
    layers, whose updates are scaled to the size of AdamW's, and AdamW for other tensors.
    """
    learning_rate: Annotated[float, Field(gt=0)] = 7e-6
    """The learning rate at its peak."""
    dither: bool = True
    """Spread the first masters over what is rounded to their BF16 weights, so that the first steps show in versions;
    not in quantized runs. Where sites train together, the coordinator always does so.
    """
    warmup_steps: int = Field(default=10, ge=0)
    """Steps over which the learning rate rises to its peak."""
    schedule: ScheduleName = "constant"
    """The learning rate after the warm-up: constant, or down until `training_steps`."""
    final_share: float = Field(default=0.0, ge=0, le=1)
    """The share of the peak that the learning rate comes down to."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's first moment (PULSE, Table 8: 0.9)."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of AdamW's second moment (PULSE, F.4: 0.95 in deployment)."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, per step and learning rate."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """A gradient with a larger L2 norm is scaled down to this one (PULSE, Table 8: 1.0)."""

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.schedule != "constant" and self.training_steps <= self.warmup_steps:
            raise ValueError(
                f'schedule "{self.schedule}" needs training_steps above warmup_steps = {self.warmup_steps}'
            )
        return self

    def share(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1, as a share of its peak."""
        if self.warmup_steps and step <= self.warmup_steps:
            return min(1.0, step / self.warmup_steps)
        if self.schedule == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.training_steps - self.warmup_steps))
        height = 1 - progress if self.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.final_share + (1 - self.final_share) * height


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
