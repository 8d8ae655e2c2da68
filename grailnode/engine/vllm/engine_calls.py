"""The calls that an engine sends to vLLM: the body of each request, and its result from the worker's record of it.

vLLM's answer and the record are compared: each difference makes both worthless.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from grailnode.engine.vllm.inside.prefill_checks import STATISTICS
from grailnode.engine.vllm.inside.request_records import ARGUMENT, GIVEN
from grailnode.engine.vllm.vllm_client import BrokenEngineError
from protocol.rollout import sketch
from protocol.rollout.checking import Check, CheckRules
from protocol.rollout.sampling import SamplingParams
from protocol.rollout.sketch import SketchKey
from roles.policy.sequences import Tokens
from roles.ports import CheckRequest, Generation

Values = dict[str, object]
Result_co = TypeVar("Result_co", covariant=True)


class Call(Protocol[Result_co]):
    """A request to vLLM.

    Attributes:
        request: the id of its record inside of vLLM.
    """

    @property
    def request(self) -> str: ...

    def body(self) -> Values:
        """Return the body of the request."""

    def result(self, answer: list[int], record: Mapping[str, Any]) -> Result_co:
        """Return the result.

        Args:
            answer: the tokens of vLLM's answer.
            record: what inside/request_records.py collected.

        Raises:
            BrokenEngineError: the record does not fit.
        """


@dataclass(frozen=True)
class GenerationCall:
    """A completion to generate.

    Attributes:
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

    def body(self) -> Values:
        params, arguments = self.params, Values(id=self.request, states=self.states)
        if self.states and self.sketch is not None:
            arguments["sketch"] = _coded(self.sketch)
        if self.seed is not None:
            arguments |= {"seed": self.seed.hex(), "offset": self.offset, **_distribution(params)}
        parameters = {"max_tokens": params.max_tokens, "stop_token_ids": list(params.stops), "ignore_eos": True}
        return _body(self.prompt, parameters, arguments)

    def result(self, answer: list[int], record: Mapping[str, Any]) -> Generation:
        drawn, length = tuple(record["tokens"]), len(answer)
        # vLLM may cut or repeat tokens of an answer; the record says what was drawn. With async scheduling vLLM draws
        # once more after a stop token, before it knows of it.
        is_longer = length < len(drawn) and self.params.is_complete(tuple(answer))
        if not drawn or list(drawn[:length] if is_longer else drawn) != answer:
            raise BrokenEngineError("vLLM answered other tokens than its worker recorded")
        likely = tuple(_numbers(record["log_probabilities"]).tolist()[:length])
        if self.states and self.sketch is not None:
            states = base64.b64decode(record["states"])
            if len(states) != len(drawn) * sketch.BYTES_PER_TOKEN:
                raise BrokenEngineError(f"vLLM recorded {len(states)} bytes for the sketch of {len(drawn)} tokens")
            own_sketch = states[: length * sketch.BYTES_PER_TOKEN]
            return Generation(drawn[:length], torch.empty(length, 0), likely, own_sketch)
        hidden = _rows(record["states"], len(drawn)) if self.states else torch.empty(len(drawn), 0)
        return Generation(drawn[:length], hidden[:length], likely)


@dataclass(frozen=True)
class PrefillCall:
    """A completion whose hidden states are computed; it has at least one token."""

    request: str
    prompt: Tokens
    completion: Tokens

    def body(self) -> Values:
        return _prefill_body(self.request, self.prompt, self.completion, {})

    def result(self, answer: list[int], record: Mapping[str, Any]) -> Tensor:
        """Return the states: float32 [T, D]."""
        return _rows(record["states"], len(self.completion))


@dataclass(frozen=True)
class CheckCall:
    """A completion to check; at least one of its tokens is checked."""

    request: str
    item: CheckRequest
    rules: CheckRules

    def body(self) -> Values:
        item, rules = self.item, self.rules
        drawn = item.drawn or [True] * len(item.completion)
        tokens = [token if own else GIVEN for token, own in zip(item.completion, drawn, strict=True)]
        bounds = [rules.slack, rules.limit, rules.cap]
        arguments = {"seed": item.seed.hex(), "sketch": _coded(item.sketch), **_distribution(rules.params)}
        arguments["check"] = {"tokens": tokens, "stops": list(rules.params.stops), "bounds": bounds}
        return _prefill_body(self.request, item.prompt, item.completion, arguments)

    def result(self, answer: list[int], record: Mapping[str, Any]) -> Check:
        rows = _rows(record["states"], len(self.item.drawn_tokens.tokens))
        if rows.shape[1] != STATISTICS:
            raise BrokenEngineError(f"vLLM recorded {rows.shape[1]} numbers for each token that is checked")
        values, margins, stops, logprobs = rows.split([sketch.BYTES_PER_TOKEN, 1, 1, 1], dim=1)  # type: ignore[no-untyped-call]
        return Check(values, margins[:, 0], stops[:, 0].bool(), logprobs[:, 0])


def _coded(key: SketchKey) -> dict[str, str]:
    return {"kind": key.kind, "seed": key.seed.hex()}


def _distribution(params: SamplingParams) -> Values:
    """Return the arguments that say from which distribution tokens are drawn."""
    filters = params.filters
    return Values(temperature=params.temperature, top_k=filters.top_k, top_p=filters.top_p, min_p=filters.min_p)


def _prefill_body(request: str, prompt: Tokens, completion: Tokens, arguments: Values) -> Values:
    """Return the body of a request that computes a completion; the one token that it samples is dropped.

    The prompt is computed in the same request. The cache of prefixes must not be read, because the states of cached
    tokens are not computed again.
    """
    parameters = {"max_tokens": 1, "ignore_eos": True, "skip_reading_prefix_cache": True}
    # The last token is no input: nothing is drawn after it.
    return _body(prompt + completion[:-1], parameters, {"id": request, "begin": len(prompt) - 1, **arguments})


def _body(tokens: Tokens, parameters: Mapping[str, object], arguments: Values) -> Values:
    extra = {"temperature": 0, "detokenize": False, "extra_args": {ARGUMENT: arguments}}
    return {"token_ids": list(tokens), "sampling_params": {**parameters, **extra}}


def _rows(data: str, count: int) -> Tensor:
    """Return the numbers recorded for so many tokens: float32 [T, D]."""
    flat = _numbers(data)
    if not len(flat) or not count or len(flat) % count:
        raise BrokenEngineError(f"vLLM recorded {len(flat)} numbers for the states of {count} tokens")
    return flat.view(count, len(flat) // count)


def _numbers(data: str) -> Tensor:
    # A bytearray, because torch refuses memory that cannot be written.
    flat = bytearray(base64.b64decode(data))
    return torch.frombuffer(flat, dtype=torch.float32) if flat else torch.empty(0)
