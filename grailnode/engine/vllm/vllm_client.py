"""HTTP requests to a server of vLLM: completions by one client, control by another.

With one pool of connections, a control call would wait behind hundreds of completions. Every request has a deadline,
because a server whose worker hangs still accepts requests. A completion and the worker's record of it
are compared: each difference makes both worthless.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import httpx
import torch
import trio
from torch import Tensor

from grailnode.engine.vllm.inside.hidden_taps import WIDTHS
from grailnode.engine.vllm.inside.request_records import ARGUMENT, GIVEN, CheckArguments, RequestArguments
from grailnode.engine.vllm.vllm_server import Server
from protocol.rollout import sketch
from protocol.rollout.checking import Check, CheckRules
from protocol.rollout.sampling import SamplingParams
from roles.policy.sequences import Tokens
from roles.ports import CheckRequest, EngineError, Generation, Request

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
        is_complete = self.params.is_complete(tuple(answer))
        # vLLM may cut or repeat tokens of an answer; the record says what was drawn. With async scheduling vLLM draws
        # once more after a stop token, before it knows of it.
        is_longer = length < len(drawn) and is_complete
        if not drawn or list(drawn[:length] if is_longer else drawn) != answer:
            raise BrokenEngineError("vLLM answered other tokens than its worker recorded")
        if not is_complete:
            raise EngineError(
                f"vLLM ended a completion after {length} of {self.params.max_tokens} tokens: it has no room for more, "
                "so raise engine.max_tokens or its --max-model-len"
            )
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


_CHUNK_BYTES: Final = 4 << 20
_POLL_SECONDS: Final = 0.02
_REQUEST_SECONDS: Final = 3600.0  # of a completion, which may wait for others before it
_ATTEMPTS: Final = 5  # a kept connection may have been closed by the server


class BrokenEngineError(EngineError):
    """vLLM does not answer, or not what it was asked for: a restart may help."""


class RefusedCommandError(EngineError):
    """A rank refused a command; vLLM itself goes on, but poisoned weights must be loaded again."""

    def __init__(self, message: str, *, poisoned: bool = False, tensors: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.poisoned = poisoned
        self.tensors = tensors


class VllmClient:
    """A node's connections to one server, at most so many for completions."""

    def __init__(self, server: Server, *, control_seconds: float = 60.0, connections: int = 512) -> None:
        self._shares_files = server.shares_files
        self._control = server.client(control_seconds, 4)
        self._data = server.client(_REQUEST_SECONDS, connections)

    async def aclose(self) -> None:
        with trio.CancelScope(shield=True):
            await self._control.aclose()
            await self._data.aclose()

    async def call(self, command: str, seconds: float | None = None, **arguments: object) -> list[dict[str, Any]]:
        """Carry out a command of inside/weight_session.py on every rank; return the answers in order of rank."""
        body = {"method": "grailnode", "args": [command, json.dumps(arguments)]}
        answer = _parsed(await self._post(self._control, "/collective_rpc", body, seconds))
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list) or not results or not all(map(_is_result, results)):
            raise BrokenEngineError(f"{command}: vLLM answered without results; is the worker extension loaded?")
        # One rank that failed makes the command fail; the damaged tensors of all ranks are named.
        errors = [result for result in results if "error" in result]
        if errors:
            poisoned = any(error.get("kind") == "PoisonedError" for error in errors)
            tensors = {str(name) for error in errors for name in error.get("tensors", ())}
            raise RefusedCommandError(str(errors[0]["error"]), poisoned=poisoned, tensors=tuple(sorted(tensors)))
        return [result["value"] for result in results]

    async def finish(self, command: str, **arguments: object) -> list[dict[str, Any]]:
        """Carry out a command that begins long work; return its results when every rank has finished."""
        await self.call(command, None, **arguments)
        while True:
            states = await self.call("state")
            if not any(state.get("running") for state in states):
                return states
            await trio.sleep(_POLL_SECONDS)

    async def share(self, path: Path) -> str:
        """Make a file of this machine readable for the server, and return its path there."""
        if self._shares_files:
            return str(path)
        first = True
        with path.open("rb") as file:
            # An empty file is sent too: the first chunk also makes the file.
            while (chunk := file.read(_CHUNK_BYTES)) or first:
                data = base64.b64encode(chunk).decode()
                await self.call("upload", name=path.name, data=data, first=first)
                first = False
        return path.name

    async def post(self, path: str, body: object = None, **query: str) -> None:
        """Send a control request, such as /pause."""
        await self._post(self._control, f"{path}?{httpx.QueryParams(query)}" if query else path, body, None)

    async def generate(self, body: Mapping[str, object]) -> tuple[list[int], str]:
        """Generate one completion; return its token ids, and why it ended."""
        answer = _parsed(await self._post(self._data, "/inference/v1/generate", body, None))
        try:
            choice = answer["choices"][0]
            return [int(token) for token in choice["token_ids"]], str(choice["finish_reason"])
        except (LookupError, TypeError, ValueError) as error:
            raise BrokenEngineError(f"vLLM answered a completion without tokens ({error})") from error

    async def _post(self, client: httpx.AsyncClient, path: str, body: object, seconds: float | None) -> httpx.Response:
        timeout = httpx.USE_CLIENT_DEFAULT if seconds is None else httpx.Timeout(seconds)
        for attempt in range(_ATTEMPTS):
            try:
                response = await client.post(path, json=body, timeout=timeout)
                # One that timed out may be under way; after a closed connection, the next one replaces its record.
                break
            except httpx.TimeoutException as error:
                raise BrokenEngineError(f"vLLM did not answer {path} in time") from error
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
                if attempt + 1 == _ATTEMPTS:
                    raise BrokenEngineError(f"vLLM ended the connection of {path} ({error})") from error
            except (httpx.HTTPError, RuntimeError) as error:  # a RuntimeError if another call has closed the client
                raise BrokenEngineError(f"vLLM cannot be reached ({error or type(error).__name__})") from error
        # With a status of 4xx vLLM refuses a request and goes on; with any other it is broken.
        if httpx.codes.is_client_error(response.status_code):
            raise RefusedCommandError(f"vLLM refused {path}: {_one_line(response)}")
        if not response.is_success:
            raise BrokenEngineError(f"vLLM failed at {path} with {response.status_code}: {_one_line(response)}")
        return response


def _parsed(response: httpx.Response) -> Any:
    """Return the JSON of an answer; None if it is empty."""
    try:
        return response.json() if response.content else None
    except ValueError as error:
        raise BrokenEngineError(f"vLLM answered {response.url.path} with {_one_line(response)}") from error


def _is_result(item: object) -> bool:
    """Return whether this is what a rank of ours answers to a command."""
    return isinstance(item, dict) and ("error" in item or isinstance(item.get("value"), dict))


def _one_line(response: httpx.Response) -> str:
    """Return the beginning of an answer, which another program may have given."""
    return " ".join(response.text[:600].split())[:300]
