"""Samples with one engine, such as vLLM, and computes hidden states with torch (implements roles.ports.Engine).

The other way is that vLLM's own states are recorded while it samples. A prefill costs a second computation and a second
copy of the weights in this process; in exchange the states of a sketch come from the arithmetic of a validator that
checks with torch, so that they differ less from its own.
"""

from collections.abc import Sequence
from dataclasses import replace

from grailnode.engine.torch_engine import TorchEngine
from grailnode.engine.vllm.version_gate import VersionGate
from protocol.chain.manifest import Manifest
from protocol.digest import Weights
from protocol.rollout.checking import Check, CheckRules
from protocol.rollout.sampling import SamplingParams
from roles.policy.sequences import Tokens
from roles.ports import CheckRequest, Engine, EngineError, Forward, Generation, Request


class TorchPrefill:
    """An engine of two that always serve the same version.

    Args:
        sampler: draws the tokens; its states are not used.
        prefill: computes the states of completions.
    """

    def __init__(self, sampler: Engine, prefill: TorchEngine) -> None:
        self._sampler = sampler
        self._prefill = prefill
        self._staged: int | None = None  # in both engines
        self._gate = VersionGate()
        # The sampler's arithmetic decides the tokens.
        self.generating_arithmetic = sampler.generating_arithmetic
        self.checking_arithmetic = prefill.checking_arithmetic

    @property
    def version(self) -> int | None:
        return self._sampler.version

    @property
    def takes_patches(self) -> bool:
        return self._prefill.takes_patches or self._sampler.takes_patches

    async def stage(self, version: int, weights: Weights) -> None:
        self._staged = None
        await self._prefill.stage(version, weights)
        await self._sampler.stage(version, weights)
        self._staged = version

    async def stage_patch(self, version: int, patch: bytes, manifest: Manifest) -> None:
        self._staged = None
        await self._prefill.stage_patch(version, patch, manifest)
        await self._sampler.stage_patch(version, patch, manifest)
        self._staged = version

    async def commit(self) -> None:
        # The torch engine swaps one reference, which cannot fail after the sampler's commit.
        if self._staged is None:
            raise EngineError("nothing is staged")
        self._staged = None
        async with self._gate.exclusive():
            await self._sampler.commit()
            await self._prefill.commit()

    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        """Implements Engine.generate; the states are those of a prefill."""
        async with self._gate.shared():
            generations = await self._sampler.generate(requests, params)
            prompts = [request.prompt for request in requests]
            forwards = await self._prefill.forward(prompts, [generation.tokens for generation in generations])
        return [
            replace(generation, hidden=forward.hidden)
            for generation, forward in zip(generations, forwards, strict=True)
        ]

    async def greedy(self, prompts: Sequence[Tokens], params: SamplingParams) -> list[Tokens]:
        return await self._sampler.greedy(prompts, params)

    async def forward(self, prompts: Sequence[Tokens], completions: Sequence[Tokens]) -> list[Forward]:
        return await self._prefill.forward(prompts, completions)

    async def check(self, requests: Sequence[CheckRequest], rules: CheckRules) -> list[Check]:
        return await self._prefill.check(requests, rules)
