"""An engine whose concurrent callers share its batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import trio
from trio.testing import wait_all_tasks_blocked

from grailnode.engine.torch_engine import Forward, TorchEngine
from protocol.rollout.checking import Check, CheckRules
from protocol.rollout.sampling import SamplingParams
from roles.ports import CheckRequest, Generation, Request

Tokens = tuple[int, ...]


@dataclass
class _Call:
    items: list[Any]
    completion: trio.Event = field(default_factory=trio.Event)
    results: list[Any] = field(default_factory=list)


class BatchedEngine:
    """Implements Engine over another engine. Calls made before all tasks of the program wait become one batch."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._pending_calls: dict[SamplingParams | CheckRules | None, list[_Call]] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        if not all(request.seed for request in requests):
            return await self._engine.generate(requests, params)  # a batch has seeds, or none
        return await self._batch(params, list(requests))

    async def forward(self, prompts: Sequence[Tokens], completions: Sequence[Tokens]) -> list[Forward]:
        return await self._batch(None, [(tuple(p), tuple(c)) for p, c in zip(prompts, completions, strict=True)])

    async def check(self, requests: Sequence[CheckRequest], rules: CheckRules) -> list[Check]:
        return await self._batch(rules, list(requests))

    async def _batch(self, kind: SamplingParams | CheckRules | None, items: list[Any]) -> list[Any]:
        """Return the results of a call's items. The first caller computes for all; the others wait."""
        call = _Call(items)
        calls = self._pending_calls.setdefault(kind, [])
        calls.append(call)
        if call is not calls[0]:
            await call.completion.wait()
            return call.results
        await wait_all_tasks_blocked()
        del self._pending_calls[kind]
        all_items = [item for other in calls for item in other.items]
        results = await self._compute(kind, all_items)
        for other in calls:
            other.results, results = results[: len(other.items)], results[len(other.items) :]
            other.completion.set()
        return call.results

    async def _compute(self, kind: SamplingParams | CheckRules | None, items: list[Any]) -> list[Any]:
        if isinstance(kind, SamplingParams):
            return await self._engine.generate(items, kind)
        unique_items = list(dict.fromkeys(items))  # two validators may check the same rollouts
        results: Sequence[Check | Forward]
        if kind is None:
            results = await self._engine.forward([item[0] for item in unique_items], [item[1] for item in unique_items])
        else:
            results = await self._engine.check(unique_items, kind)
        result_of = dict(zip(unique_items, results, strict=True))
        return [result_of[item] for item in items]
