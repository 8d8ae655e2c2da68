"""How vLLM is run: the keys of a node's section [engine] that are for vLLM."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class VllmSettings(BaseModel):
    """How a server of vLLM is found or started, and what of it is used."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: Annotated[
        Path | None, Field(description="Interpreter of vLLM's environment, which `grailnode engine install` makes.")
    ] = None
    url: Annotated[
        str,
        Field(
            pattern=r"^(https?://[^/]+)?$",
            description="Base URL of a vLLM server that somebody else runs, instead of `python`.",
        ),
    ] = ""
    device: Annotated[str, Field(description="Device of torch or vLLM: cpu, cuda, cuda:1, ...")] = "cpu"
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        Field(description="Type to which the policy's BF16 weights are widened for computing."),
    ] = "float32"
    states: Annotated[
        Literal["vllm", "torch"],
        Field(
            description="What computes the hidden states behind sketches and checks: the vLLM that generates, or a "
            "prefill by torch in the node."
        ),
    ] = "vllm"
    runner: Annotated[Literal["v1", "v2"], Field(description="vLLM's model runner.")] = "v1"
    max_tokens: Annotated[
        int, Field(ge=0, description="Most tokens of a prompt with its completion; 0 is what the model allows.")
    ] = 0
    sequences: Annotated[int, Field(ge=1, description="Most sequences that vLLM computes at the same time.")] = 256
    ranks: Annotated[int, Field(ge=1, description="Processes of tensor parallelism, one GPU each.")] = 1
    start_seconds: Annotated[float, Field(gt=0, description="Longest time of a start of vLLM, in seconds.")] = 300.0
    cache_gib: Annotated[int, Field(ge=1, description="Memory for keys and values on a CPU, in GiB.")] = 1
    memory_share: Annotated[float, Field(gt=0, le=1, description="Share of a GPU's memory that vLLM may take.")] = 0.85
    flags: Annotated[tuple[str, ...], Field(description="Further flags of vLLM's command line.")] = ()
