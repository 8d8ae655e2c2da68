"""Seconds of each part of an update in place, by size and number of changed elements, and a projection to 7B."""

import argparse
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
import trio

from bench.engines.setting import cache_flags, directory, policy_of, report, requests_of, timed, with_changes
from grailnode.engine.models import build
from grailnode.engine.vllm.vllm_engine import VllmEngine
from grailnode.engine.vllm.vllm_server import ChildServer
from grailnode.engine.vllm.vllm_settings import VllmSettings
from protocol.chain.manifest import Manifest
from protocol.digest import digest_weights
from protocol.patch import encode
from protocol.rollout.sampling import SamplingParams
from roles.policy.causal_model import CausalModel
from roles.ports import Request

ELEMENTS_OF_7B: Final = 7_615_616_512  # Qwen2.5-7B


@dataclass(frozen=True)
class Update:
    """One update in place.

    Attributes:
        elements: of the policy; changed: of them.
        patch_bytes: size of the patch.
        stage, drain, commit, pause, read_back: seconds; the pause includes the commit, and not the drain.
        rate, rate_while_staging: tokens a second before, and while the patch is staged.
    """

    elements: int
    changed: int
    patch_bytes: int
    stage: float
    drain: float
    commit: float
    pause: float
    read_back: float
    rate: float
    rate_while_staging: float


async def patches(python: Path, arguments: argparse.Namespace) -> None:
    """Measure updates of each size and share, and project those of the largest size to 7B."""
    updates: list[tuple[float, Update]] = []
    for size in arguments.sizes:
        with directory() as place:
            updates = await _updates(python, size, arguments, place)
    for share, update in updates:
        report(kind="patches", size="7B", share=share, projected_from=arguments.sizes[-1], **_projection(share, update))


async def _updates(python: Path, size: str, arguments: argparse.Namespace, place: Path) -> list[tuple[float, Update]]:
    """Measure an update for each share of changed elements, on one server."""
    policy, weights = policy_of(size, place, arguments.device)
    settings = VllmSettings(
        python=python,
        device=arguments.device,
        dtype=arguments.dtypes[0],
        memory_share=arguments.memory_share,
        flags=cache_flags(arguments.device),
    )
    engine = ObservedEngine(build(policy), ChildServer(settings, policy.directory, place), place, settings.dtype)
    requests = requests_of(arguments.batch, engine.vocabulary)
    updates = []
    try:
        await engine.stage(0, weights)
        await engine.commit()
        for version, share in enumerate(arguments.shares, 1):
            target = with_changes(weights, share, version, arguments.device)
            updates.append((share, await _update(engine, version, weights, target, requests)))
            report(kind="patches", size=Path(size).name, share=share, **_rounded(updates[-1][1]))
            weights = target
    finally:
        await engine.close()
    return updates


class ObservedEngine(VllmEngine):
    """An engine that remembers the times of its last commit."""

    def __init__(self, model: CausalModel, server: ChildServer, place: Path, dtype: str) -> None:
        self.committed: dict[str, float] = {}
        self.vocabulary = model.vocabulary
        super().__init__(model, server, place / "engine", dtype=getattr(torch, dtype), report=self._note)

    def _note(self, event: str, **fields: Any) -> None:
        if event == "engine-committed":
            self.committed = fields


async def _update(
    engine: ObservedEngine,
    version: int,
    weights: dict[str, torch.Tensor],
    target: dict[str, torch.Tensor],
    requests: list[Request],
) -> Update:
    """Stage, commit and read back a version."""
    patch = encode(weights, target)
    manifest = Manifest.model_construct(version=version, weights=digest_weights(target))
    rate = await _rate(engine, requests, partial(trio.sleep, 2.0))
    stages: list[float] = []

    async def stage() -> None:
        stages.append(await timed(partial(engine.stage_patch, version, patch, manifest)))

    rate_while_staging = await _rate(engine, requests, stage)
    await engine.commit()
    read_back = await timed(engine.verify)
    changed = sum(int((weights[n].view(torch.int16) != target[n].view(torch.int16)).sum()) for n in weights)
    elements = sum(tensor.numel() for tensor in weights.values())
    drain, commit, pause = (engine.committed[name] for name in ("drain", "seconds", "pause"))
    return Update(elements, changed, len(patch), stages[0], drain, commit, pause, read_back, rate, rate_while_staging)


async def _rate(engine: ObservedEngine, requests: list[Request], work: Callable[[], Awaitable[None]]) -> float:
    """Return the tokens a second of full batches one after another, from the beginning of some work past its end."""
    params = SamplingParams(1.0, 16, ())
    async with trio.open_nursery() as nursery:
        begin, tokens, ended = perf_counter(), 0, trio.Event()

        async def run() -> None:
            await work()
            ended.set()

        nursery.start_soon(run)
        while not tokens or not ended.is_set():
            tokens += sum(len(generation.tokens) for generation in await engine.generate(requests, params))
            seconds = perf_counter() - begin
    return tokens / seconds


def _rounded(update: Update) -> dict[str, float]:
    return {name: round(value, 4) for name, value in vars(update).items()}


def _projection(share: float, update: Update) -> dict[str, str]:
    """Return the seconds of an update of 7B with a share of changes, at the rates of one that was measured.

    A commit writes the changed elements. Staging decodes, and reading back digests, all elements.
    """
    changed = round(share * ELEMENTS_OF_7B)
    return {
        "commit": _seconds(changed, update.changed, update.commit),
        "stage": _seconds(ELEMENTS_OF_7B, update.elements, update.stage),
        "read_back": _seconds(ELEMENTS_OF_7B, update.elements, update.read_back),
    }


def _seconds(elements: int, measured: int, seconds: float) -> str:
    rate = measured / seconds
    return f"{elements:,} / ({measured:,} / {seconds:.4f} s = {rate:,.0f}/s) = {elements / rate:.2f} s"
