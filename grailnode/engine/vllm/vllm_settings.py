"""How vLLM is run, by the keys of a node's section [engine] that are for vLLM, and how long an engine waits for it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from roles.settings_base import Settings


class VllmSettings(Settings):
    """How a server of vLLM is found or started, and what of it is used."""

    python: Path | None = None
    """The interpreter of vLLM's environment. Default: that of `grailnode engine install`, unless `url` is set."""
    url: str = Field(default="", pattern=r"^(https?://[^/]+)?$")
    """The base URL of a vLLM server that somebody else runs, instead of `python`."""
    device: str = "cpu"
    """The device of torch or vLLM: cpu, cuda, cuda:1, ..."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What BF16 weights are widened to; bfloat16 on a GPU, where the run admits it."""
    runner: Literal["v1", "v2"] = "v1"
    """For vLLM: the version of its model runner."""
    max_tokens: int = Field(default=0, ge=0)
    """For vLLM: most tokens of a prompt with its completion; 0: what the model allows."""
    sequences: int = Field(default=256, ge=1)
    """For vLLM: most completions that it computes at the same time."""
    ranks: int = Field(default=1, ge=1)
    """For vLLM: processes of tensor parallelism, one GPU each."""
    replicas: int = Field(default=1, ge=1, le=64)
    """For vLLM: servers among which a node spreads its requests, each with `ranks` GPUs of its own."""
    start_seconds: float = Field(default=300.0, gt=0)
    """For vLLM: longest time of a start."""
    cache_gib: int = Field(default=1, ge=1)
    """For vLLM on a CPU: memory for keys and values, in GiB."""
    memory_share: float = Field(default=0.85, gt=0, le=1)
    """For vLLM on a GPU: share of its memory that vLLM may take."""
    flags: tuple[str, ...] = ()
    """For vLLM: further flags of its command line."""

    def replica(self, number: int) -> "VllmSettings":
        """Return the settings of one of the replicas: its device is the first of its own GPUs."""
        if self.replicas == 1 or self.device == "cpu":
            return self
        first = int(self.device.partition(":")[2] or 0)
        return self.model_copy(update={"device": f"cuda:{first + number * self.ranks}"})

    @model_validator(mode="after")
    def _check_replicas(self) -> "VllmSettings":
        if self.url and self.replicas > 1:
            raise ValueError("replicas are servers that the node starts: drop engine.url, or set engine.replicas to 1")
        return self


@dataclass(frozen=True)
class EngineLimits:
    """The patience of the engine, in seconds, and other limits."""

    control: float = 60.0  # for a control call
    hang: float = 20.0  # without a sign of life while requests are under way
    drain: float = 60.0  # for requests of others that are under way at a commit
    connections: int = 512  # completions under way at the same time; vLLM batches as many as its own limit allows
    verify_interval: int = 64  # all tensors are read back after so many commits
