"""The engine of a node that computes with vLLM (implements roles.ports.Engine); the package's docstring has its rules.

Here are the calls: completions and checks, sent to vLLM all at once, whose answers are checked against the engine's
own records. The server's life is in server_supervisor.py, the weights in engine_weights.py.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from grailnode.engine.vllm.checkpoints import RecoveryStep
from grailnode.engine.vllm.engine_calls import Call, CheckCall, GenerationCall
from grailnode.engine.vllm.engine_weights import EngineWeights
from grailnode.engine.vllm.layout_check import PARAMS, check_layout, probes
from grailnode.engine.vllm.vllm_client import BrokenEngineError, VllmClient
from grailnode.engine.vllm.vllm_server import Server
from protocol.proof import arithmetic_of
from protocol.rollout import sampling
from protocol.rollout.checking import Check, CheckRules
from protocol.rollout.sampling import SamplingParams
from roles.first_failure import first_failure
from roles.policy.causal_model import CausalModel
from roles.policy.sequences import check_ids
from roles.ports import CheckRequest, EngineError, Generation, Request

_ATTEMPTS: Final = 3
_COLLECT: Final = 64  # records in one answer
Result = TypeVar("Result")


class VllmEngine(EngineWeights):
    """Samples from a policy and checks completions, with vLLM; the arguments are those of EngineWeights."""

    def __init__(
        self, model: CausalModel, server: Server, directory: Path, *, dtype: torch.dtype = torch.float32, **options: Any
    ) -> None:
        super().__init__(model, server, directory, dtype=dtype, **options)
        self.arithmetic = arithmetic_of("vllm", str(dtype).removeprefix("torch."))
        self._next_request = 0
        self._abandoned: set[str] = set()
        """Requests whose records may be left in the worker: their calls were cancelled, or failed beside another."""

    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        """Implements Engine.generate; vLLM batches the requests as they come. ValueError if one is invalid."""
        _check(requests, self._model.vocabulary)
        return await self._answered([GenerationCall(self._id(), item, params) for item in requests])

    async def check(self, requests: Sequence[CheckRequest], rules: CheckRules) -> list[Check]:
        _check(requests, self._model.vocabulary)
        check_ids([item.completion for item in requests], self._model.vocabulary)
        calls = [CheckCall(self._id(), item, rules) for item in requests if item.drawn_tokens]
        checks = iter(await self._answered(calls))
        nothing = Check.join([])
        return [next(checks) if item.drawn_tokens else nothing for item in requests]

    async def _check_layout(self, client: VllmClient, step: RecoveryStep) -> None:
        requests = probes(self._model.vocabulary)
        calls = [GenerationCall(self._id(), request, PARAMS) for request in requests]
        results = await self._run_calls(step.version, calls, client)
        prompts = [request.prompt for request in requests]
        await self._run_sync(check_layout, self._model, step.path, prompts, results)

    async def _answered(self, calls: Sequence[Call[Result]]) -> list[Result]:
        """Carry out calls and collect their records; after a failure of vLLM all of them are repeated."""
        async with self.in_use() as serving:
            return await self._server.repeat(partial(self._run_calls, serving.version, calls), _ATTEMPTS)

    async def _run_calls(self, version: int, calls: Sequence[Call[Result]], client: VllmClient) -> list[Result]:
        try:
            return await self._call_and_collect(version, calls, client)
        except BrokenEngineError:
            raise  # the server is replaced, with all records
        except BaseException:
            self._abandoned.update(call.request for call in calls)
            raise

    async def _call_and_collect(self, version: int, calls: Sequence[Call[Result]], client: VllmClient) -> list[Result]:
        answers: list[list[int]] = [[] for _ in calls]
        unsent = iter(enumerate(calls))
        senders = min(len(calls), self._limits.connections)

        async def send() -> None:
            for place, call in unsent:
                answers[place], reason = await client.generate(self._target | call.body())
                if reason not in ("stop", "length"):
                    raise BrokenEngineError(f"vLLM ended a completion by {reason}")

        async with first_failure(EngineError, ValueError) as tasks:
            tasks.start_soon(self._server.watch, client)
            async with first_failure(EngineError, ValueError) as senders_group:
                for _ in range(senders):
                    senders_group.start_soon(send)
            tasks.cancel_scope.cancel()
        results: list[Result] = []
        for begin in range(0, len(calls), _COLLECT):
            part, abandoned = slice(begin, begin + _COLLECT), frozenset(self._abandoned)
            requests = [call.request for call in calls[part]]
            records = (await client.call("take", requests=requests, abandoned=list(abandoned)))[0]
            self._abandoned -= abandoned
            results += [
                call.result(tokens, _checked(records.get(call.request), version))
                for call, tokens in zip(calls[part], answers[part], strict=True)
            ]
        return results

    def _id(self) -> str:
        self._next_request += 1
        return f"{id(self):x}-{self._next_request}"


def _checked(record: Mapping[str, Any] | None, version: int) -> Mapping[str, Any]:
    """Return a record if one version computed all of it, and it is the one that the caller uses."""
    if record is None:
        raise BrokenEngineError("vLLM answered a request that its worker has no record of")
    if record["versions"] != [str(version)]:
        versions = ", ".join(record["versions"])
        raise BrokenEngineError(f"a completion was computed by version {versions}, and version {version} is served")
    return record


def _check(requests: Sequence[Request | CheckRequest], vocabulary: int) -> None:
    seeds = [request.seed for request in requests if request.seed or isinstance(request, CheckRequest)]
    if any(len(seed) != sampling.SEED_BYTES for seed in seeds):
        raise ValueError(f"a seed has {sampling.SEED_BYTES} bytes")
    if not all(request.prompt for request in requests):
        raise ValueError("a prompt has at least one token")
    check_ids([request.prompt for request in requests], vocabulary)
