"""Tokens a second, beside the same vLLM without us."""

import argparse
import os
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Self, TypeVar

import torch
import trio
from torch import Tensor

from bench.engines.setting import cache_flags, directory, policy_of, report, requests_of, timed
from grailnode.engine.models import build
from grailnode.engine.policy import Policy
from grailnode.engine.torch_engine import TorchEngine
from grailnode.engine.vllm.vllm_client import VllmClient
from grailnode.engine.vllm.vllm_engine import VllmEngine
from grailnode.engine.vllm.vllm_server import ChildServer
from grailnode.engine.vllm.vllm_settings import VllmSettings
from protocol.rollout.sampling import SamplingParams
from protocol.rollout.sketch import SketchKey
from roles.policy.causal_model import CausalModel
from roles.ports import Engine, Request

Way = Callable[[], Awaitable[Any]]
AnyServer = TypeVar("AnyServer", bound=ChildServer)


class PlainVllm(ChildServer):
    """A server that samples by itself: without our logits processor, worker extension and changes of vLLM."""

    def flags(self, socket: str) -> list[str]:
        """Return the flags without those that load our code."""
        words = super().flags(socket)
        for flag in ("--logits-processors", "--worker-extension-cls"):
            place = words.index(flag)
            del words[place : place + 2]
        return words


@dataclass(frozen=True)
class Task:
    """What all ways compute; no token ends a completion, so that they compute the same number.

    Attributes:
        place: a directory for servers and engines.
    """

    place: Path
    policy: Policy
    model: CausalModel
    weights: dict[str, Tensor]
    requests: list[Request]
    params: SamplingParams

    @classmethod
    def of_size(cls, size: str, place: Path, arguments: argparse.Namespace) -> Self:
        """Return the task for a policy of some size."""
        policy, weights = policy_of(size, place, arguments.device)
        model = build(policy)
        key = SketchKey("projection", bytes(32))
        requests = [replace(request, sketch=key) for request in requests_of(arguments.rollouts, model.vocabulary)]
        params = SamplingParams(1.0, arguments.tokens, (model.vocabulary - 1,))
        return cls(place, policy, model, weights, requests, params)

    def server(self, kind: type[AnyServer], name: str, python: Path, arguments: argparse.Namespace) -> AnyServer:
        """Return a server of this kind, with files of its own; two of them share a GPU."""
        settings = VllmSettings(
            python=python,
            device=arguments.device,
            dtype=arguments.dtypes[0],
            sequences=arguments.batch,
            memory_share=arguments.memory_share,
            flags=cache_flags(arguments.device),
        )
        return kind(settings, self.policy.directory, self.place / f"server-{name}")

    async def serve(self, engine: Engine) -> Way:
        """Serve the weights with an engine; return the work that is measured."""
        await engine.stage(0, self.weights)
        await engine.commit()
        return partial(engine.generate, self.requests, self.params)


async def speed(python: Path, arguments: argparse.Namespace) -> None:
    """Compare tokens a second with those of plain vLLM; *greedy* is without noise and sketches, and *bare* plain vLLM
    without log-probabilities.
    """
    dtype = getattr(torch, arguments.dtypes[0])
    for size in arguments.sizes:
        async with AsyncExitStack() as stack:
            task = Task.of_size(size, stack.enter_context(directory()), arguments)
            server = task.server(ChildServer, "grailnode", python, arguments)
            engine = VllmEngine(task.model, server, task.place / "engine", dtype=dtype)
            stack.push_async_callback(engine.close)
            plain = task.server(PlainVllm, "plain", python, arguments)
            stack.callback(plain.close)
            ways = {"grailnode": await task.serve(engine)}
            likely = [Request(item.prompt, b"") for item in task.requests]
            ways["greedy"] = partial(engine.generate, likely, task.params)
            await plain.start()
            client = await stack.enter_async_context(aclosing(VllmClient(plain)))
            ways["plain"] = partial(plain_completions, client, task.requests, task.params)
            ways["bare"] = partial(plain_completions, client, task.requests, task.params, None)
            if arguments.torch:
                ways["torch"] = await task.serve(TorchEngine(task.model))
            rates = await compared(ways, "plain", [server, plain], arguments)
            if arguments.device != "cpu":
                rates |= {"grailnode_gpu_mib": gpu_mebibytes(server), "plain_gpu_mib": gpu_mebibytes(plain)}
            report(kind="speed", size=Path(size).name, batch=arguments.batch, **rates)


async def compared(
    ways: dict[str, Way], base: str, servers: Sequence[ChildServer], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Measure each way in turn, several times after one turn that warms up.

    Returns:
        The best tokens a second of each way; the ratios of the others to `base`, in each turn and as their median; the
        fewest milliseconds of the processor that a token took, of this process and the servers together, which hardly
        depend on other programs; and the load of the machine. Ways in one turn had nearly the same load.
    """
    tokens = arguments.rollouts * arguments.tokens
    rates: dict[str, list[float]] = {name: [] for name in ways}
    costs: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(arguments.repetitions + 1):
        for name, way in ways.items():
            before = _processor_seconds(servers)
            seconds = await timed(way)
            if turn:
                rates[name].append(tokens / seconds)
                costs[name].append(1000 * (_processor_seconds(servers) - before) / tokens)
    result: dict[str, Any] = {name: round(max(values)) for name, values in rates.items()}
    for name in ways.keys() - {base}:
        ratios = [rate / other for rate, other in zip(rates[name], rates[base], strict=True)]
        result[f"{name}_to_{base}"] = round(median(ratios), 3)
        result[f"{name}_to_{base}_by_turn"] = [round(ratio, 3) for ratio in ratios]
    result |= {f"{name}_processor_ms_a_token": round(min(values), 3) for name, values in costs.items()}
    return result | {"load": round(os.getloadavg()[0], 1)}


def _processor_seconds(servers: Sequence[ChildServer]) -> float:
    """Return the seconds of the processor that this process and all processes of servers have used."""
    groups, ticks = {server.process_id for server in servers}, 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) in groups:
                ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def gpu_mebibytes(server: ChildServer) -> int:
    """Return the memory that a server's processes have on GPUs: their peak, since torch keeps what it had."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    used = 0
    for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines():
        process, mebibytes = line.split(",")
        with suppress(ProcessLookupError):
            used += int(mebibytes) if os.getpgid(int(process)) == server.process_id else 0
    return used


async def plain_completions(
    client: VllmClient, requests: Sequence[Request], params: SamplingParams, logprobs: int | None = 0
) -> None:
    """Generate with vLLM's own sampling and log-probabilities."""

    async def one(request: Request) -> None:
        sampling = {"temperature": 1.0, "max_tokens": params.max_tokens, "ignore_eos": True, "logprobs": logprobs}
        await client.generate({"token_ids": list(request.prompt), "sampling_params": {**sampling, "detokenize": False}})

    async with trio.open_nursery() as nursery:
        for request in requests:
            nursery.start_soon(one, request)
