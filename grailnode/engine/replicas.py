"""Several engines of one node that serve the same version: each computes a part of the requests.

Interface: `Replicas` implements roles.ports.Engine over engines that do. A replica may be a server of vLLM with GPUs of
its own.

Invariants:
1. A call is answered by one version: no call runs while a commit does, and a commit waits for the calls under way.
2. While the replicas serve different versions, because some commits failed, nothing is served. `version` is None then,
   so the node stages whole weights in all of them.
3. Requests are dealt in adjacent parts, so that completions of one prompt stay together and share its computation.

The worst input: a commit that fails in one replica only (nothing is served until all of them have one version again).
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from grailnode.engine.vllm.version_gate import VersionGate
from protocol.chain.manifest import Manifest
from protocol.digest import Weights
from protocol.rollout.checking import Check, CheckRules
from protocol.rollout.sampling import SamplingParams
from roles.first_failure import first_failure
from roles.gather import gather
from roles.policy.sequences import Tokens
from roles.ports import CheckRequest, Engine, EngineError, Generation, Request

Item = TypeVar("Item")
Result = TypeVar("Result")


class Replicas:
    """An engine of several that compute alike.

    Args:
        engines: at least one; all of one kind, with the same settings but for the device.
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
        self._is_staged = False
        async with self._gate.exclusive():
            await self._all(lambda engine: engine.commit())

    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        return await self._dealt(requests, lambda engine, part: engine.generate(part, params))

    async def greedy(self, prompts: Sequence[Tokens], params: SamplingParams) -> list[Tokens]:
        return await self._dealt(prompts, lambda engine, part: engine.greedy(part, params))

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
            versions = [engine.version for engine in self._engines]
            if len(set(versions)) > 1:
                raise EngineError(f"the replicas serve different versions ({versions})")
            ends = [len(items) * place // len(versions) for place in range(len(versions) + 1)]
            calls = [
                partial(compute, engine, items[begin:end])
                for engine, begin, end in zip(self._engines, ends[:-1], ends[1:], strict=True)
            ]
            results = await gather(lambda call: call(), calls, at_once=len(calls), errors=(EngineError, ValueError))
        return [result for part in results for result in part]
