"""The engine of a node that computes with vLLM (implements roles.ports.Engine); the package's docstring has its rules.

Here are the calls: completions and prefills, sent to vLLM all at once, whose answers are checked against the engine's
own records. The server's life is in server_supervisor.py, the weights in engine_weights.py.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import trio
from torch import Tensor

from grailnode.engine.models import check_fit
from grailnode.engine.torch_engine import RunSync
from grailnode.engine.vllm.checkpoints import Checkpoints, RecoveryStep
from grailnode.engine.vllm.engine_weights import EngineWeights, restore
from grailnode.engine.vllm.inside.request_records import ARGUMENT
from grailnode.engine.vllm.layout_check import PARAMS, check_layout, probes
from grailnode.engine.vllm.server_supervisor import EventReport, ServerSupervisor
from grailnode.engine.vllm.verify_requests import Verification
from grailnode.engine.vllm.vllm_client import BrokenEngineError, VllmClient
from grailnode.engine.vllm.vllm_server import Server
from grailnode.engine.vllm.vllm_settings import EngineLimits
from protocol.chain.manifest import Manifest
from protocol.digest import Weights
from protocol.proof import arithmetic_of
from protocol.rollout import sampling, sketch
from protocol.rollout.sampling import SamplingParams
from protocol.rollout.sketch import SketchKey
from roles.first_failure import first_failure
from roles.policy.causal_model import CausalModel
from roles.policy.sequences import Tokens
from roles.ports import EngineError, Forward, Generation, Request

_ATTEMPTS: Final = 3
_COLLECT: Final = 64  # records in one answer


@dataclass(frozen=True)
class _GenerationCall:
    """A completion to generate.

    Attributes:
        request: the id of its record inside of vLLM.
        seed: 16 bytes; None for the most likely tokens.
        states: whether the hidden states are recorded.
        sketch: for the sketch that is recorded in their place.
        offset: position of the first token, for the noise.
    """

    request: str
    prompt: Tokens
    seed: bytes | None
    params: SamplingParams
    states: bool = True
    sketch: SketchKey | None = None
    offset: int = 0


@dataclass(frozen=True)
class _PrefillCall:
    """A completion to prefill; it has at least one token."""

    request: str
    prompt: Tokens
    completion: Tokens


class VllmEngine:
    """Samples from a policy and checks completions, with vLLM.

    Args:
        model: the policy's architecture; only its output projection is computed here, for `forward`.
        server: where vLLM runs.
        directory: of this machine, for the checkpoint and the patches of the served version.
        dtype: in which the server computes.
        states: whether completions come with their hidden states; without, these have a width of 0.
        run_sync: runs a function outside the event loop.
        report: gets an event when the engine is restarted, patched or verified.
    """

    takes_patches = True

    def __init__(
        self,
        model: CausalModel,
        server: Server,
        directory: Path,
        *,
        dtype: torch.dtype = torch.float32,
        states: bool = True,
        limits: EngineLimits | None = None,
        run_sync: RunSync = trio.to_thread.run_sync,
        report: EventReport = lambda event, **fields: None,
    ) -> None:
        self.generating_arithmetic = self.checking_arithmetic = arithmetic_of("vllm", str(dtype).removeprefix("torch."))
        self._model = model
        self._dtype = dtype
        self._states = states
        self._limits = limits or EngineLimits()
        checkpoints = Checkpoints(directory)
        self._run_sync = run_sync
        bring_back = partial(restore, checkpoints, self._check_layout)
        self._server = ServerSupervisor(server, model.shapes, dtype, self._limits, bring_back, report)
        self._weights = EngineWeights(self._server, checkpoints, self._limits, run_sync, self._check_layout, report)
        self._head: tuple[bytes, dict[str, Tensor]] = b"", {}  # digest of a version, and its output projection
        self._next_request = 0

    @property
    def version(self) -> int | None:
        return self._weights.version

    async def close(self) -> None:
        """Stop the server, if it is a child."""
        await self._server.close()

    async def stage(self, version: int, weights: Weights) -> None:
        check_fit(self._model, weights)
        await self._weights.stage(version, weights)

    async def stage_patch(self, version: int, patch: bytes, manifest: Manifest) -> None:
        await self._weights.stage_patch(version, patch, manifest)

    async def commit(self) -> None:
        await self._weights.commit()

    async def verify(self) -> Verification:
        """Read all tensors back from the engine's memory and compare them with the served version's digest."""
        return await self._weights.verify()

    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        """Implements Engine.generate; vLLM batches the requests as they come.

        Raises:
            ValueError: a prompt without tokens, a seed that is not 16 bytes, or a token id outside the vocabulary.
        """
        self._check_ids([request.prompt for request in requests])
        if any(len(request.seed) != sampling.SEED_BYTES for request in requests):
            raise ValueError(f"a seed has {sampling.SEED_BYTES} bytes")
        calls = [
            _GenerationCall(self._id(), item.prompt, item.seed, params, self._states, item.sketch, item.offset)
            for item in requests
        ]
        return await self._answered(calls)

    async def greedy(self, prompts: Sequence[Tokens], params: SamplingParams) -> list[Tokens]:
        self._check_ids(prompts)
        calls = [_GenerationCall(self._id(), prompt, None, params, states=False) for prompt in prompts]
        return [generation.tokens for generation in await self._answered(calls)]

    async def forward(self, prompts: Sequence[Tokens], completions: Sequence[Tokens]) -> list[Forward]:
        self._check_ids(prompts)
        self._check_ids(completions, empty=True)
        calls = [_PrefillCall(self._id(), *pair) for pair in zip(prompts, completions, strict=True)]
        async with self._weights.in_use() as serving:
            nonempty = [call for call in calls if call.completion]
            states = iter(await self._attempts(serving.version, nonempty, _prefill_body))
            project = partial(self._project, await self._output_projection(serving.digest))
        width = self._model.shapes[self._head_names()[0]][-1]
        return [Forward(next(states).hidden if call.completion else torch.empty(0, width), project) for call in calls]

    async def _check_layout(self, client: VllmClient, step: RecoveryStep) -> None:
        """Compare what the server computes from a checkpoint, which it serves, with the torch model."""
        requests = probes(self._model.vocabulary)
        calls = [_GenerationCall(self._id(), request.prompt, request.seed, PARAMS) for request in requests]
        results = await self._run_calls(step.version, calls, _completion_body, client)
        prompts = [request.prompt for request in requests]
        await self._run_sync(check_layout, self._model, step.path, prompts, results)

    async def _answered(self, calls: list[_GenerationCall]) -> list[Generation]:
        async with self._weights.in_use() as serving:
            return await self._attempts(serving.version, calls, _completion_body)

    async def _attempts(
        self, version: int, calls: Sequence[Any], body: Callable[[Any], dict[str, object]]
    ) -> list[Generation]:
        """Carry out calls and collect their records; after a failure of vLLM all of them are repeated."""
        return await self._server.repeat(partial(self._run_calls, version, calls, body), _ATTEMPTS)

    async def _run_calls(
        self, version: int, calls: Sequence[Any], body: Callable[[Any], dict[str, object]], client: VllmClient
    ) -> list[Generation]:
        answers: list[list[int]] = [[] for _ in calls]
        unsent = iter(enumerate(calls))
        senders = min(len(calls), self._limits.connections)

        async def send() -> None:
            for place, call in unsent:
                answers[place], reason = await client.generate(body(call))
                if reason not in ("stop", "length"):
                    raise BrokenEngineError(f"vLLM ended a completion by {reason}")

        async with first_failure(EngineError, ValueError) as tasks:
            tasks.start_soon(self._server.watch, client)
            async with first_failure(EngineError, ValueError) as senders_group:
                for _ in range(senders):
                    senders_group.start_soon(send)
            tasks.cancel_scope.cancel()
        results: list[Generation] = []
        for begin in range(0, len(calls), _COLLECT):
            part = slice(begin, begin + _COLLECT)
            records = (await client.call("take", requests=[call.request for call in calls[part]]))[0]
            results += [
                _collect(call, tokens, records.get(call.request), version)
                for call, tokens in zip(calls[part], answers[part], strict=True)
            ]
        return results

    def _id(self) -> str:
        self._next_request += 1
        return f"{id(self):x}-{self._next_request}"

    def _check_ids(self, sequences: Sequence[Tokens], *, empty: bool = False) -> None:
        top = self._model.vocabulary
        if not empty and not all(sequences):
            raise ValueError("a prompt has at least one token")
        if any(not 0 <= token < top for sequence in sequences for token in sequence):
            raise ValueError(f"a token id outside the vocabulary of {top}")

    def _head_names(self) -> list[str]:
        """Return the names of the tensors from which the output projection computes logits."""
        own = [name for name in self._model.shapes if name in ("lm_head.weight", "lm_head.bias")]
        return own or [name for name in self._model.shapes if name.endswith("embed_tokens.weight")]

    async def _output_projection(self, digest: bytes) -> dict[str, Tensor]:
        """Return the output projection of the version with this digest, read back once for each version."""
        if self._head[0] != digest:
            self._head = digest, await self._server.repeat(self._read_output_projection)
        return self._head[1]

    async def _read_output_projection(self, client: VllmClient) -> dict[str, Tensor]:
        head = {}
        for name in self._head_names():
            bits = base64.b64decode((await client.call("tensor", name=name))[0]["bits"])
            tensor = torch.frombuffer(bytearray(bits), dtype=torch.bfloat16).reshape(self._model.shapes[name])
            head[name] = tensor.to(self._dtype)
        return head

    def _project(self, head: dict[str, Tensor], hidden: Tensor) -> Tensor:
        with torch.inference_mode():
            return self._model.logits(head, hidden.to(self._dtype))


def _completion_body(call: _GenerationCall) -> dict[str, object]:
    """Return the body of a request that generates a completion."""
    params = call.params
    arguments: dict[str, object] = {"id": call.request, "states": call.states}
    if call.states and call.sketch is not None:
        arguments["sketch"] = {"kind": call.sketch.kind, "seed": call.sketch.seed.hex()}
    if call.seed is not None:
        filters = params.filters
        arguments |= {"seed": call.seed.hex(), "temperature": params.temperature, "offset": call.offset}
        arguments |= {"top_k": filters.top_k, "top_p": filters.top_p, "min_p": filters.min_p}
    parameters = {"max_tokens": params.max_tokens, "stop_token_ids": list(params.stops), "ignore_eos": True}
    return _body(call.prompt, parameters, arguments)


def _prefill_body(call: _PrefillCall) -> dict[str, object]:
    """Return the body of a request that computes the states of a completion; the one token that it samples is dropped.

    The prompt is computed in the same request. The cache of prefixes must not be read, because the states of cached
    tokens are not computed again.
    """
    parameters = {"max_tokens": 1, "ignore_eos": True, "skip_reading_prefix_cache": True}
    # The last token is no input: nothing is drawn after it.
    tokens = call.prompt + call.completion[:-1]
    return _body(tokens, parameters, {"id": call.request, "begin": len(call.prompt) - 1})


def _body(tokens: Tokens, parameters: Mapping[str, object], arguments: Mapping[str, object]) -> dict[str, object]:
    extra = {"temperature": 0, "detokenize": False, "extra_args": {ARGUMENT: arguments}}
    return {"token_ids": list(tokens), "sampling_params": {**parameters, **extra}}


def _collect(
    call: _GenerationCall | _PrefillCall, tokens: list[int], record: Mapping[str, Any] | None, version: int
) -> Generation:
    """Return what the engine recorded for a call, after comparing it with vLLM's answer.

    Raises:
        BrokenEngineError: nothing was recorded, the tokens differ, or they are not all of the version.
    """
    # The order of these checks does not matter; each alone makes the answer worthless.
    if record is None:
        raise BrokenEngineError("vLLM answered a request that its worker has no record of")
    # One version drew all tokens, and it is the one that the caller uses.
    if record["versions"] != [str(version)]:
        versions = ", ".join(record["versions"])
        raise BrokenEngineError(f"a completion was computed by version {versions}, and version {version} is served")
    states = base64.b64decode(record["states"])
    if isinstance(call, _PrefillCall):
        hidden = _rows(states, len(call.completion))
        return Generation(call.completion, hidden, ())
    drawn, length = tuple(record["tokens"]), len(tokens)
    # vLLM may cut or repeat tokens of an answer; the record says what was drawn. With async scheduling vLLM draws once
    # more after a stop token, before it knows of it.
    is_longer = length < len(drawn) and call.params.is_complete(tuple(tokens))
    if not drawn or list(drawn[:length] if is_longer else drawn) != tokens:
        raise BrokenEngineError("vLLM answered other tokens than its worker recorded")
    likely = tuple(_numbers(base64.b64decode(record["log_probabilities"])).tolist()[:length])
    if call.states and call.sketch is not None:
        own_sketch = states[: length * sketch.BYTES_PER_TOKEN]
        if len(states) != len(drawn) * sketch.BYTES_PER_TOKEN:
            raise BrokenEngineError(f"vLLM recorded {len(states)} bytes for the sketch of {len(drawn)} tokens")
        return Generation(drawn[:length], torch.empty(length, 0), likely, own_sketch)
    hidden = _rows(states, len(drawn)) if call.states else torch.empty(len(drawn), 0)
    return Generation(drawn[:length], hidden[:length], likely)


def _rows(states: bytes, count: int) -> Tensor:
    """Return recorded states: float32 [T, D]."""
    flat = _numbers(states)
    if not len(flat) or not count or len(flat) % count:
        raise BrokenEngineError(f"vLLM recorded {len(flat)} numbers for the states of {count} tokens")
    return flat.view(count, len(flat) // count)


def _numbers(data: bytes) -> Tensor:
    # A bytearray, because torch refuses memory that cannot be written.
    return torch.frombuffer(bytearray(data), dtype=torch.float32) if data else torch.empty(0)
