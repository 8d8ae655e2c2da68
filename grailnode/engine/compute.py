"""The device and the dtype of a node, and the engine that uses them."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from grailnode.engine.torch_engine import TorchEngine
from protocol.proof import Arithmetic, arithmetic_of
from roles.policy.causal_model import CausalModel
from roles.ports import Engine


@dataclass(frozen=True)
class VllmCompute:
    """The settings with which a node computes by vLLM.

    Attributes:
        policy: the policy directory.
        directory: for the server's log, and the checkpoint and patches of the served version.
        python: the interpreter of vLLM's environment, to start a server with; None to use the one at `url`.
        url: the base URL of a server that somebody else runs.
        states: what computes hidden states, "vllm" or "torch" (vllm/torch_prefill.py).
        runner, max_tokens, sequences, ranks, cache_gib, flags: see ServerSettings in vllm/vllm_server.py.
    """

    policy: Path
    directory: Path
    python: Path | None = None
    url: str = ""
    states: str = "vllm"
    runner: str = "v1"
    max_tokens: int = 0
    sequences: int = 256
    ranks: int = 1
    cache_gib: int = 1
    flags: tuple[str, ...] = field(default_factory=tuple)


@dataclass(frozen=True)
class Compute:
    """The settings with which a node computes.

    Attributes:
        model: the policy's architecture.
        device: of torch, or of vLLM; dtype: the BF16 weights are widened to this for computing.
        max_batch_tokens: padded tokens of one batch of torch.
        vllm: None to compute with torch.
    """

    model: CausalModel
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    max_batch_tokens: int = 8192
    vllm: VllmCompute | None = None


def exact_refusal(kind: str, device: str, dtype: str) -> str:
    """Return why an engine does not compute in exact arithmetic; empty if it does.

    Args:
        kind, device, dtype: of run.toml's section `engine`.
    """
    if kind == "torch" and device == "cpu" and dtype == "float32":
        return ""
    refusal = (
        'this run\'s numerics are exact, so that its nodes compute the same bits: set engine.kind = "torch", '
        f'engine.device = "cpu", engine.dtype = "float32" (here they are {kind}, {device} and {dtype})'
    )
    if kind == "vllm":
        refusal += (
            "; the batch-invariant mode of vLLM, for GPUs of compute capability 8.0 and more, gives other bits than a "
            "CPU, and others on each kind of GPU"
        )
    return refusal


def config_arithmetics(kind: str, dtype: str, states: str) -> tuple[Arithmetic, Arithmetic]:
    """Return the arithmetics in which an engine generates and checks.

    Args:
        kind, dtype, states: of run.toml's section `engine`.
    """
    return arithmetic_of(kind, dtype), arithmetic_of("torch" if states == "torch" else kind, dtype)


def make_engine(compute: Compute, run_sync: Callable[..., Awaitable[Any]]) -> TorchEngine:
    """Return the torch engine that samples completions and checks them.

    Args:
        run_sync: runs a function that computes for long, off the event loop's thread.
    """
    with_torch = compute.vllm is None or compute.vllm.states == "torch"
    return TorchEngine(
        compute.model,
        device=compute.device if with_torch else "cpu",
        dtype=compute.dtype,
        max_batch_tokens=compute.max_batch_tokens,
        run_sync=run_sync,
    )


@asynccontextmanager
async def open_engine(
    compute: Compute, run_sync: Callable[..., Awaitable[Any]], report: Callable[..., None]
) -> AsyncIterator[Engine]:
    """Yield the engine that a node's settings name; a server that belongs to it ends with the context.

    An engine of vLLM is also verified when `grailnode engine verify` asks for it.

    Args:
        run_sync: runs a function that computes for long, off the event loop's thread.
        report: `report(event, **fields)`, as Telemetry.event.
    """
    if compute.vllm is None:
        yield make_engine(compute, run_sync)
        return
    from grailnode.engine.vllm.torch_prefill import TorchPrefill  # noqa: PLC0415 - only nodes with vLLM need it
    from grailnode.engine.vllm.verify_requests import serve_verifications  # noqa: PLC0415
    from grailnode.engine.vllm.vllm_engine import VllmEngine  # noqa: PLC0415
    from grailnode.engine.vllm.vllm_server import ChildServer, ExternalServer, ServerSettings  # noqa: PLC0415

    place = compute.vllm
    server: ChildServer | ExternalServer = ExternalServer(place.url)
    if place.python is not None:
        dtype = str(compute.dtype).removeprefix("torch.")
        settings = ServerSettings(
            place.python,
            place.policy,
            place.directory,
            device=compute.device,
            dtype=dtype,
            runner=place.runner,
            max_tokens=place.max_tokens,
            sequences=place.sequences,
            ranks=place.ranks,
            cache_gib=place.cache_gib,
            flags=place.flags,
        )
        server = ChildServer(settings)
    sampler = VllmEngine(
        compute.model,
        server,
        place.directory / "weights",
        dtype=compute.dtype,
        states=place.states == "vllm",
        run_sync=run_sync,
        report=report,
    )
    engine: Engine = sampler if place.states == "vllm" else TorchPrefill(sampler, make_engine(compute, run_sync))
    try:
        async with serve_verifications(place.directory, sampler.verify, report):
            yield engine
    finally:
        await sampler.close()
