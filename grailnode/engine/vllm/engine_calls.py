"""The calls that an engine sends to vLLM: the body of each request, and its result from the worker's record of it.

The answer and the record are compared: each difference makes both worthless.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from grailnode.engine.vllm.inside.hidden_taps import WIDTHS
from grailnode.engine.vllm.inside.request_records import ARGUMENT, GIVEN, CheckArguments, RequestArguments
from grailnode.engine.vllm.vllm_client import BrokenEngineError
from protocol.rollout import sketch
from protocol.rollout.checking import Check, CheckRules
from protocol.rollout.sampling import SamplingParams
from roles.policy.sequences import Tokens
from roles.ports import CheckRequest, Generation, Request

Values = dict[str, object]
Result_co = TypeVar("Result_co", covariant=True)


class Call(Protocol[Result_co]):
    """A request to vLLM."""

    @property
    def request(self) -> str: ...

    def body(self) -> Values:
        """Return the body of the request."""

    def result(self, answer: list[int], record: Mapping[str, Any]) -> Result_co:
        """Return the result from the tokens of vLLM's answer and from what inside/request_records.py collected."""


@dataclass(frozen=True)
class GenerationCall:
    """A completion to generate."""

    request: str
    item: Request
    params: SamplingParams

    @property
    def has_noise(self) -> bool:
        """Whether it is sampled. The states of the most likely tokens are not recorded."""
        return bool(self.item.seed)

    def body(self) -> Values:
        item, params, seed = self.item, self.params, self.item.seed or None
        distribution = params.temperature, params.filters
        arguments = RequestArguments(self.request, seed, *distribution, self.has_noise, item.sketch, offset=item.offset)
        return _body(item.prompt, arguments, max_tokens=params.max_tokens, stop_token_ids=list(params.stops))

    def result(self, answer: list[int], record: Mapping[str, Any]) -> Generation:
        drawn, length = tuple(record["tokens"]), len(answer)
        # vLLM may cut or repeat tokens of an answer; the record says what was drawn. With async scheduling vLLM draws
        # once more after a stop token, before it knows of it.
        is_longer = length < len(drawn) and self.params.is_complete(tuple(answer))
        if not drawn or list(drawn[:length] if is_longer else drawn) != answer:
            raise BrokenEngineError("vLLM answered other tokens than its worker recorded")
        likely = tuple(_numbers(record["log_probabilities"]).tolist()[:length])
        if self.item.sketch is not None:
            states = base64.b64decode(record["states"])
            if len(states) != len(drawn) * sketch.BYTES_PER_TOKEN:
                raise BrokenEngineError(f"vLLM recorded {len(states)} bytes for the sketch of {len(drawn)} tokens")
            own_sketch = states[: length * sketch.BYTES_PER_TOKEN]
            return Generation(drawn[:length], torch.empty(length, 0), likely, own_sketch)
        hidden = _rows(record["states"], len(drawn)) if self.has_noise else torch.empty(len(drawn), 0)
        return Generation(drawn[:length], hidden[:length], likely)


@dataclass(frozen=True)
class CheckCall:
    """A completion to check; at least one of its tokens is checked."""

    request: str
    item: CheckRequest
    rules: CheckRules

    def body(self) -> Values:
        item = self.item
        drawn = item.drawn or [True] * len(item.completion)
        tokens = tuple(token if own else GIVEN for token, own in zip(item.completion, drawn, strict=True))
        check = CheckArguments(len(item.prompt) - 1, tokens, item.seed, item.sketch, self.rules)
        # The one token that vLLM samples is dropped. The prompt is computed in the same request: states of tokens in
        # the cache of prefixes would not be computed again. The last token is no input: nothing is drawn after it.
        inputs, arguments = item.prompt + item.completion[:-1], RequestArguments(self.request, check=check)
        return _body(inputs, arguments, max_tokens=1, skip_reading_prefix_cache=True)

    def result(self, answer: list[int], record: Mapping[str, Any]) -> Check:
        rows = _rows(record["checked"], len(self.item.drawn_tokens))
        rivals = rows.shape[1] - sum(WIDTHS)
        if rivals != 2 * self.rules.rivals:
            raise BrokenEngineError(f"vLLM recorded {rows.shape[1]} numbers for each token that is checked")
        values, margins, stops, logprobs, rival = rows.split([*WIDTHS, rivals], dim=1)  # type: ignore[no-untyped-call]
        return Check(values, margins[:, 0], stops[:, 0].bool(), logprobs[:, 0], rival)


def _body(tokens: Tokens, arguments: RequestArguments, **parameters: object) -> Values:
    extra = {"temperature": 0, "ignore_eos": True, "detokenize": False, "extra_args": {ARGUMENT: arguments.to_json()}}
    return {"token_ids": list(tokens), "sampling_params": {**parameters, **extra}}


def _rows(data: str, count: int) -> Tensor:
    """Return the numbers recorded for so many tokens: float32 [T, D]."""
    flat = _numbers(data)
    if not len(flat) or not count or len(flat) % count:
        raise BrokenEngineError(f"vLLM recorded {len(flat)} numbers for {count} tokens")
    return flat.view(count, len(flat) // count)


def _numbers(data: str) -> Tensor:
    # A bytearray, because torch refuses memory that cannot be written.
    flat = bytearray(base64.b64decode(data))
    return torch.frombuffer(flat, dtype=torch.float32) if flat else torch.empty(0)
