"""An engine whose concurrent callers share its batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import trio
from trio.testing import wait_all_tasks_blocked

from protocol.proof import Arithmetic
from protocol.rollout.sampling import SamplingParams
from roles.ports import Engine, Forward, Generation, Request

Tokens = tuple[int, ...]


@dataclass
class _Call:
    items: list[Any]
    completion: trio.Event = field(default_factory=trio.Event)
    results: list[Any] = field(default_factory=list)


class BatchedEngine:
    """Implements Engine over another engine. Calls made before all tasks of the program wait become one batch."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pending_calls: dict[SamplingParams | None, list[_Call]] = {}

    @property
    def version(self) -> int | None:
        return self._engine.version

    @property
    def takes_patches(self) -> bool:
        return self._engine.takes_patches

    @property
    def generating_arithmetic(self) -> Arithmetic:
        return self._engine.generating_arithmetic

    @property
    def checking_arithmetic(self) -> Arithmetic:
        return self._engine.checking_arithmetic

    async def stage(self, version: int, weights: Any) -> None:
        await self._engine.stage(version, weights)

    async def stage_patch(self, version: int, patch: bytes, manifest: Any) -> None:
        await self._engine.stage_patch(version, patch, manifest)

    async def commit(self) -> None:
        await self._engine.commit()

    async def greedy(self, prompts: Sequence[Tokens], params: SamplingParams) -> list[Tokens]:
        return await self._engine.greedy(prompts, params)

    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        return await self._batch(params, list(requests))

    async def forward(self, prompts: Sequence[Tokens], completions: Sequence[Tokens]) -> list[Forward]:
        return await self._batch(None, [(tuple(p), tuple(c)) for p, c in zip(prompts, completions, strict=True)])

    async def _batch(self, params: SamplingParams | None, items: list[Any]) -> list[Any]:
        """Return the results of a call's items. The first caller computes for all; the others wait."""
        call = _Call(items)
        calls = self._pending_calls.setdefault(params, [])
        calls.append(call)
        if call is not calls[0]:
            await call.completion.wait()
            return call.results
        await wait_all_tasks_blocked()
        del self._pending_calls[params]
        all_items = [item for other in calls for item in other.items]
        results = await self._compute(params, all_items)
        for other in calls:
            other.results, results = results[: len(other.items)], results[len(other.items) :]
            other.completion.set()
        return call.results

    async def _compute(self, params: SamplingParams | None, items: list[Any]) -> list[Any]:
        if params is not None:
            return await self._engine.generate(items, params)
        unique_items = list(dict.fromkeys(items))  # two validators may check the same rollouts
        forwards = await self._engine.forward([item[0] for item in unique_items], [item[1] for item in unique_items])
        forward_of = dict(zip(unique_items, forwards, strict=True))
        return [forward_of[item] for item in items]
