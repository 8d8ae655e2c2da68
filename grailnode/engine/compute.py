"""The device and the dtype of a node, and the engine that uses them: one, or several that serve the same version."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from grailnode.engine.draft_engine import DraftEngine
from grailnode.engine.torch_engine import RunSync, TorchEngine
from grailnode.engine.version_gate import VersionGate
from grailnode.engine.vllm.vllm_settings import VllmSettings
from protocol.chain.manifest import Manifest
from protocol.digest import Weights
from protocol.lora import LoraSpec
from protocol.rollout.checking import Check, CheckRules
from protocol.rollout.sampling import SamplingParams, triton_fault
from roles.gather import first_failure, gather
from roles.policy.causal_model import CausalModel
from roles.ports import CheckRequest, Engine, EngineError, Generation, Request


@dataclass(frozen=True)
class Compute:
    """The settings with which a node computes; the fields `policy`, `directory` and `lora` are for vLLM alone."""

    model: CausalModel
    device: str = "cpu"
    dtype: torch.dtype = torch.float32  # the BF16 weights are widened to this for computing
    max_batch_tokens: int = 8192  # padded tokens of one batch of torch
    drafts: bool = False  # whether an 8-bit copy of the policy drafts tokens for torch
    vllm: VllmSettings | None = None  # how vLLM computes; None to compute with torch
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
        # A replica has GPUs of its own, and a directory for its log and its weights.
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


Item = TypeVar("Item")
Result = TypeVar("Result")


class Replicas:
    """Several engines of a node, of one kind and with the same settings but for the device, that serve the same
    version, of which each computes a part of the requests. Implements roles.ports.Engine. A replica may be a server of
    vLLM with GPUs of its own.

    1. A call is answered by one version: no call runs while a commit does, and a commit waits for the calls under way.
    2. While the replicas serve different versions, because some commits failed, nothing is served. `version` is None
       then, so the node stages whole weights in all of them.
    3. Requests are dealt in adjacent parts, so that completions of one prompt stay together and share its computation.

    The worst input is a commit that fails in one replica only.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._gate = VersionGate()
        self._is_staged = False
        self.arithmetic = engines[0].arithmetic

    @property
    def version(self) -> int | None:
        versions = {engine.version for engine in self._engines}
        return versions.pop() if len(versions) == 1 else None

    @property
    def takes_patches(self) -> bool:
        return self._engines[0].takes_patches

    async def stage(self, version: int, weights: Weights) -> None:
        await self._stage(lambda engine: engine.stage(version, weights))

    async def stage_patch(self, version: int, patch: bytes, manifest: Manifest) -> None:
        await self._stage(lambda engine: engine.stage_patch(version, patch, manifest))

    async def commit(self) -> None:
        if not self._is_staged:
            raise EngineError("nothing is staged")
        # Forgotten first: after a commit that failed in one replica, all of them are staged again.
        self._is_staged = False
        async with self._gate.exclusive():
            await self._all(lambda engine: engine.commit())

    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        return await self._dealt(requests, lambda engine, part: engine.generate(part, params))

    async def check(self, requests: Sequence[CheckRequest], rules: CheckRules) -> list[Check]:
        return await self._dealt(requests, lambda engine, part: engine.check(part, rules))

    async def _stage(self, stage: Callable[[Engine], Awaitable[None]]) -> None:
        self._is_staged = False
        await self._all(stage)
        self._is_staged = True

    async def _all(self, task: Callable[[Engine], Awaitable[None]]) -> None:
        """Run a task in all engines at once; if it fails in one, the others finish before the failure is raised."""
        async with first_failure(EngineError, cancel_others=False) as tasks:
            for engine in self._engines:
                tasks.start_soon(task, engine)

    async def _dealt(
        self, items: Sequence[Item], compute: Callable[[Engine, Sequence[Item]], Awaitable[Sequence[Result]]]
    ) -> list[Result]:
        """Have each engine compute its part of the items; return the results in order."""
        async with self._gate.shared():
            # Read inside of the gate, where no commit can change them.
            versions = [engine.version for engine in self._engines]
            if len(set(versions)) > 1:
                raise EngineError(f"the replicas serve different versions ({versions})")
            # Parts differ by one item at most.
            ends = [len(items) * place // len(versions) for place in range(len(versions) + 1)]
            calls = [
                partial(compute, engine, items[begin:end])
                for engine, begin, end in zip(self._engines, ends[:-1], ends[1:], strict=True)
            ]
            results = await gather(lambda call: call(), calls, at_once=len(calls), errors=(EngineError, ValueError))
        return [result for part in results for result in part]
