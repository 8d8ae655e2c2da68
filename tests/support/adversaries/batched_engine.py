"""An engine whose callers share its batches: windows that are tried side by side are computed side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import trio
from trio.testing import wait_all_tasks_blocked

from protocol.rollout.sampling import SamplingParams
from roles.ports import Engine, Forward, Generation, Request

Tokens = tuple[int, ...]


@dataclass
class _Call:
    items: list[Any]
    done: trio.Event = field(default_factory=trio.Event)
    results: list[Any] = field(default_factory=list)


class Together:
    """Answers as the engine behind it; calls that are made before all tasks of the program wait are answered as one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: dict[SamplingParams | None, list[_Call]] = {}

    @property
    def version(self) -> int | None:
        """Implements Engine.version."""
        return self._engine.version

    async def stage(self, version: int, weights: Any) -> None:
        """Implements Engine.stage."""
        await self._engine.stage(version, weights)

    async def commit(self) -> None:
        """Implements Engine.commit."""
        await self._engine.commit()

    async def greedy(self, prompts: Sequence[Tokens], params: SamplingParams) -> list[Tokens]:
        """Implements Engine.greedy."""
        return await self._engine.greedy(prompts, params)

    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        """Implements Engine.generate."""
        return await self._join(params, list(requests))

    async def forward(self, prompts: Sequence[Tokens], completions: Sequence[Tokens]) -> list[Forward]:
        """Implements Engine.forward."""
        return await self._join(None, [(tuple(p), tuple(c)) for p, c in zip(prompts, completions, strict=True)])

    async def _join(self, params: SamplingParams | None, items: list[Any]) -> list[Any]:
        """The results of a call's items; who comes first computes for all, the others wait."""
        call = _Call(items)
        calls = self._waiting.setdefault(params, [])
        calls.append(call)
        if call is not calls[0]:
            await call.done.wait()
            return call.results
        await wait_all_tasks_blocked()
        del self._waiting[params]
        everything = [item for one in calls for item in one.items]
        results = await self._compute(params, everything)
        for one in calls:
            one.results, results = results[: len(one.items)], results[len(one.items) :]
            one.done.set()
        return call.results

    async def _compute(self, params: SamplingParams | None, items: list[Any]) -> list[Any]:
        if params is not None:
            return await self._engine.generate(items, params)
        once = list(dict.fromkeys(items))  # two validators may look at the same work
        seen = await self._engine.forward([item[0] for item in once], [item[1] for item in once])
        found = dict(zip(once, seen, strict=True))
        return [found[item] for item in items]
