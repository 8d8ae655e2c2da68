"""The bodies of requests to vLLM, and the check of their answers against the engine's own records."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from grailnode.engine.vllm.vllm_client import BrokenEngineError
from protocol.rollout.sampling import SamplingParams
from roles.policy.sequences import Tokens
from roles.ports import Generation

ARGUMENT: Final = "grailnode"


@dataclass(frozen=True)
class GenerationCall:
    """A completion to generate.

    Attributes:
        request: the id of its record inside of vLLM.
        seed: 16 bytes; None for the most likely tokens.
        states: whether the hidden states are recorded.
    """

    request: str
    prompt: Tokens
    seed: bytes | None
    params: SamplingParams
    states: bool = True


@dataclass(frozen=True)
class PrefillCall:
    """A completion to prefill; it has at least one token."""

    request: str
    prompt: Tokens
    completion: Tokens


def completion_body(call: GenerationCall) -> dict[str, object]:
    """Return the body of a request that generates a completion."""
    params = call.params
    arguments: dict[str, object] = {"id": call.request, "states": call.states}
    if call.seed is not None:
        filters = params.filters
        arguments |= {"seed": call.seed.hex(), "temperature": params.temperature}
        arguments |= {"top_k": filters.top_k, "top_p": filters.top_p, "min_p": filters.min_p}
    sampling = {"max_tokens": params.max_tokens, "stop_token_ids": list(params.stops), "ignore_eos": True}
    return _body(call.prompt, sampling, arguments)


def prefill_body(call: PrefillCall) -> dict[str, object]:
    """Return the body of a request that computes the states of a completion; the one token that it samples is dropped.

    The prompt is computed in the same request. The cache of prefixes must not be read, because the states of cached
    tokens are not computed again.
    """
    sampling = {"max_tokens": 1, "ignore_eos": True, "skip_reading_prefix_cache": True}
    # The last token is no input: nothing is drawn after it.
    tokens = call.prompt + call.completion[:-1]
    return _body(tokens, sampling, {"id": call.request, "begin": len(call.prompt) - 1})


def _body(tokens: Tokens, sampling: Mapping[str, object], arguments: Mapping[str, object]) -> dict[str, object]:
    extra = {"temperature": 0, "detokenize": False, "extra_args": {ARGUMENT: arguments}}
    return {"token_ids": list(tokens), "sampling_params": {**sampling, **extra}}


def collect(
    call: GenerationCall | PrefillCall, tokens: list[int], record: Mapping[str, Any] | None, version: int
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
    if isinstance(call, PrefillCall):
        recorded, likely, has_states = call.completion, (), True
    else:
        recorded, likely, has_states = tuple(record["tokens"]), tuple(record["log_probabilities"]), call.states
        # vLLM may cut or repeat tokens of an answer; the record says what was drawn.
        if list(recorded) != tokens:
            raise BrokenEngineError("vLLM answered other tokens than its worker recorded")
    states = base64.b64decode(record["states"])
    # A bytearray, because torch refuses memory that cannot be written.
    flat = torch.frombuffer(bytearray(states), dtype=torch.float32) if states else torch.empty(0)
    # Whole rows of states, and none where none were asked for.
    if not recorded or len(flat) % len(recorded) or bool(len(flat)) != has_states:
        raise BrokenEngineError(f"vLLM recorded {len(flat)} numbers for the states of {len(recorded)} tokens")
    return Generation(recorded, flat.view(len(recorded), len(flat) // len(recorded)), likely)
