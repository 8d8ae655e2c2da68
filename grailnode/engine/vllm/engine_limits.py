"""The patience of an engine with vLLM, and how much it asks of it at once."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineLimits:
    """The patience of the engine, in seconds.

    Attributes:
        control: for a control call; hang: without a sign of life while requests are under way.
        drain: for requests of others that are under way at a commit.
        connections: completions under way at the same time; vLLM batches as many as its own limit allows.
        verify_interval: all tensors are read back after so many commits.
    """

    control: float = 60.0
    hang: float = 20.0
    drain: float = 60.0
    connections: int = 512
    verify_interval: int = 64
