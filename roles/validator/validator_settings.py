"""What a validator's operator decides: the section [validator] of run.toml."""

from pydantic import Field

from roles.settings_base import Settings


class ValidatorSettings(Settings):
    """Whether a validator evaluates the policy on held-out problems, and how often it polls."""

    evaluate: bool = True
    """Evaluate every version that serves on the held-out problems, by the run's rule."""
    poll_seconds: float = Field(default=0.2, gt=0)
    """Seconds between two looks for a newer version; a 40th of a window where that is longer."""
