"""Tokens a second, beside the same vLLM without us; and what the two ways to hidden states cost."""

import argparse
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trio

from bench.engines.setting import SIZES, PlainServer, directory, report, requests_of, timed
from grailnode.engine.causal_model import build
from grailnode.engine.torch_engine import TorchEngine
from grailnode.engine.vllm.torch_prefill import TorchPrefill
from grailnode.engine.vllm.vllm_client import VllmClient
from grailnode.engine.vllm.vllm_engine import VllmEngine
from grailnode.engine.vllm.vllm_server import ChildServer, ServerSettings
from protocol.rollout.sampling import SamplingParams
from roles.ports import Engine, Request
from tests.support.builders.policies import random_weights, write_policy

Runs = dict[str, Callable[[], Awaitable[Any]]]


async def speed(python: Path, arguments: argparse.Namespace) -> None:
    """Compare tokens a second; no token ends a completion, so all engines compute the same number."""
    for size in arguments.sizes:
        with directory() as place:
            policy = write_policy(place / "policy", eos_token_id=1, max_position_embeddings=512, **SIZES[size])
            model = build(policy)
            weights = random_weights(model)
            params = SamplingParams(1.0, arguments.tokens, (model.vocabulary - 1,))
            requests = requests_of(arguments.rollouts, model.vocabulary)

            def settings(name: str, policy: Path = policy.directory, place: Path = place) -> ServerSettings:
                return ServerSettings(python, policy, place / name, sequences=arguments.batch)

            async with AsyncExitStack() as stack:
                engine = VllmEngine(model, ChildServer(settings("server")), place / "engine")
                stack.push_async_callback(engine.close)
                await _serve(engine, weights)
                plain = PlainServer(settings("plain"))
                stack.callback(plain.close)
                await plain.start()
                client = await stack.enter_async_context(VllmClient(plain))
                runs: Runs = {
                    "grailnode": partial(engine.generate, requests, params),
                    "plain": partial(plain_completions, client, requests, params),
                }
                if arguments.torch:
                    reference = TorchEngine(model)
                    await _serve(reference, weights)
                    runs["torch"] = partial(reference.generate, requests, params)
                best = await _best(runs, len(requests) * arguments.tokens, arguments.repetitions)
            report(
                kind="speed",
                size=size,
                batch=arguments.batch,
                **{name: round(rate) for name, rate in best.items()},
                ratio=round(best["grailnode"] / best["plain"], 3),
            )


async def states(python: Path, arguments: argparse.Namespace) -> None:
    """Compare the ways to the hidden states behind sketches: recorded by vLLM, a prefill by torch, and none."""
    for size in arguments.sizes:
        with directory() as place:
            policy = write_policy(place / "policy", eos_token_id=1, max_position_embeddings=512, **SIZES[size])
            model = build(policy)
            weights = random_weights(model)
            params = SamplingParams(1.0, arguments.tokens, (model.vocabulary - 1,))
            requests = requests_of(arguments.rollouts, model.vocabulary)
            rates: dict[str, float] = {}
            for name in ("none", "vllm", "torch"):
                server = ChildServer(
                    ServerSettings(python, policy.directory, place / f"server-{name}", sequences=arguments.batch)
                )
                sampler = VllmEngine(model, server, place / f"engine-{name}", states=name == "vllm")
                engine: Engine = TorchPrefill(sampler, TorchEngine(model)) if name == "torch" else sampler
                async with AsyncExitStack() as stack:
                    stack.push_async_callback(sampler.close)
                    await _serve(engine, weights)
                    run: Runs = {name: partial(engine.generate, requests, params)}
                    rates |= await _best(run, len(requests) * arguments.tokens, arguments.repetitions)
            state_bytes = sum(tensor.numel() for tensor in weights.values()) * torch.float32.itemsize
            report(
                kind="states",
                size=size,
                batch=arguments.batch,
                **{name: round(rate) for name, rate in rates.items()},
                share_vllm=round(rates["vllm"] / rates["none"], 3),
                share_torch=round(rates["torch"] / rates["none"], 3),
                bytes_of_torch_weights=state_bytes,
            )


async def _serve(engine: Engine, weights: dict[str, torch.Tensor]) -> None:
    await engine.stage(0, weights)
    await engine.commit()


async def _best(runs: Runs, tokens: int, repetitions: int) -> dict[str, float]:
    """Return the largest number of tokens a second of each, of some repetitions in turn after one that warms up."""
    best = dict.fromkeys(runs, 0.0)
    for repetition in range(repetitions + 1):
        for name, run in runs.items():
            seconds = await timed(run)
            if repetition:
                best[name] = max(best[name], tokens / seconds)
    return best


async def plain_completions(client: VllmClient, requests: Sequence[Request], params: SamplingParams) -> None:
    """Generate with vLLM's own sampling and log-probabilities."""

    async def one(request: Request) -> None:
        sampling = {"temperature": 1.0, "max_tokens": params.max_tokens, "ignore_eos": True, "logprobs": 0}
        await client.generate({"token_ids": list(request.prompt), "sampling_params": {**sampling, "detokenize": False}})

    async with trio.open_nursery() as nursery:
        for request in requests:
            nursery.start_soon(one, request)
