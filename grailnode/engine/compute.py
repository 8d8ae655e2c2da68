"""The device and the dtype of a node, and the engine that uses them."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from grailnode.engine.draft_engine import DraftEngine
from grailnode.engine.replicas import Replicas
from grailnode.engine.torch_engine import RunSync, TorchEngine
from grailnode.engine.vllm.vllm_settings import VllmSettings
from protocol.lora import LoraSpec
from protocol.rollout.sampling import triton_fault
from roles.policy.causal_model import CausalModel
from roles.ports import Engine


@dataclass(frozen=True)
class Compute:
    """The settings with which a node computes; the fields `policy`, `directory` and `lora` are for vLLM alone.

    Attributes:
        dtype: the BF16 weights are widened to this for computing.
        max_batch_tokens: padded tokens of one batch of torch.
        drafts: whether an 8-bit copy of the policy drafts tokens for torch.
        vllm: how vLLM computes; None to compute with torch.
    """

    model: CausalModel
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    max_batch_tokens: int = 8192
    drafts: bool = False
    vllm: VllmSettings | None = None
    policy: Path = Path()
    directory: Path = Path()
    lora: LoraSpec | None = None


def exact_refusal(kind: str, device: str, dtype: str) -> str:
    """Return why an engine of these settings does not compute in exact arithmetic; empty if it does."""
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


def make_engine(compute: Compute, run_sync: RunSync) -> TorchEngine:
    """Return the torch engine that samples completions and checks them."""
    kind = DraftEngine if compute.drafts else TorchEngine
    return kind(
        compute.model,
        device=compute.device,
        dtype=compute.dtype,
        max_batch_tokens=compute.max_batch_tokens,
        run_sync=run_sync,
    )


@asynccontextmanager
async def open_engine(compute: Compute, run_sync: RunSync, report: Callable[..., None]) -> AsyncIterator[Engine]:
    """Yield the engine that a node's settings name; servers that belong to it end with the context.

    An engine of vLLM is also verified when `grailnode engine verify` asks for it.
    """
    device = torch.device(compute.device)
    if compute.vllm is None:
        if device.type == "cuda" and (fault := await run_sync(triton_fault, device)):
            report("triton-unusable", error=fault)
        yield make_engine(compute, run_sync)
        return
    from grailnode.engine.vllm.verify_requests import first_fault, serve_verifications  # noqa: PLC0415 - as below
    from grailnode.engine.vllm.vllm_engine import VllmEngine  # noqa: PLC0415 - only nodes with vLLM need it
    from grailnode.engine.vllm.vllm_server import ChildServer, ExternalServer  # noqa: PLC0415

    engines = []
    for number in range(compute.vllm.replicas):
        settings = compute.vllm.replica(number)
        directory = compute.directory if number == 0 else compute.directory / f"replica-{number}"
        server: ChildServer | ExternalServer = ExternalServer(settings.url, settings.start_seconds)
        if settings.python is not None:
            server = ChildServer(settings, compute.policy, directory, compute.lora)
        engines.append(
            VllmEngine(
                compute.model, server, directory / "weights", dtype=compute.dtype, run_sync=run_sync, report=report
            )
        )
    try:
        verify = partial(first_fault, [engine.verify for engine in engines])
        async with serve_verifications(compute.directory, verify, report):
            yield engines[0] if len(engines) == 1 else Replicas(engines)
    finally:
        for engine in engines:
            await engine.close()
