"""The engine of a node that computes with vLLM (implements roles.ports.Engine); the package's docstring has its rules.

Calls under way hold the version: a commit waits until they have ended, and calls that come meanwhile wait for it. After
a failure of vLLM the server is killed and started again, gets the checkpoint and the patches that led to the served
version from this machine's disk, is verified, and the call is repeated: rollouts are pure.
"""

import base64
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import trio
from safetensors import SafetensorError
from torch import Tensor

from grailnode.engine.causal_model import CausalModel, check_fit
from grailnode.engine.vllm.checkpoints import Checkpoints
from grailnode.engine.vllm.engine_requests import GenerationCall, PrefillCall, collect, completion_body, prefill_body
from grailnode.engine.vllm.server_check import check_description
from grailnode.engine.vllm.version_gate import VersionGate
from grailnode.engine.vllm.vllm_client import BrokenEngineError, RefusedCommandError, VllmClient
from grailnode.engine.vllm.vllm_server import Server
from protocol.chain.manifest import Manifest
from protocol.digest import Weights, digest_weights
from protocol.errors import ProtocolError
from protocol.proof import Arithmetic, arithmetic_of
from protocol.rollout import sampling
from protocol.rollout.sampling import SamplingParams
from roles.first_failure import first_failure
from roles.ports import EngineError, Forward, Generation, Request

T = TypeVar("T")
Tokens = tuple[int, ...]
RunSync = Callable[..., Awaitable[Any]]
EventReport = Callable[..., None]
"""`report(event, **fields)`, as Telemetry.event."""

_ATTEMPTS: Final = 3
_SIGN_OF_LIFE_SECONDS: Final = 2.0
_COLLECT: Final = 64  # records in one answer


@dataclass(frozen=True)
class EngineLimits:
    """The patience of the engine, in seconds.

    Attributes:
        control: for a control call; hang: without a sign of life while requests are under way.
        drain: for requests of others that are under way at a commit.
        connections: completions under way at the same time; vLLM batches as many as its own limit allows.
        verify_interval: all tensors are read back after so many commits.
    """

    control: float = 60.0
    hang: float = 20.0
    drain: float = 60.0
    connections: int = 512
    verify_interval: int = 64


class VllmEngine:
    """Samples from a policy and checks completions, with vLLM.

    Args:
        model: the policy's architecture; only its output projection is computed here, for `forward`.
        server: where vLLM runs.
        directory: of this machine, for the checkpoint and the patches of the served version.
        dtype: in which the server computes.
        states: whether completions come with their hidden states; without, these have a width of 0.
        run_sync: runs a function outside the event loop.
        report: gets an event when the engine is restarted or verified.
    """

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
        self._model = model
        self._server = server
        self._dtype = dtype
        self._states = states
        self._limits = limits or EngineLimits()
        self._run_sync = run_sync
        self._report = report
        self._checkpoints = Checkpoints(directory)
        self._client: VllmClient | None = None
        self._version: int | None = None
        self._staged: int | None = None
        self._head: dict[str, Tensor] | None = None  # of the served version; read back when `forward` needs it
        self._commits = 0
        self._next_request = 0
        self._control = trio.Lock()
        self._restarting = trio.Lock()
        self._gate = VersionGate()

    @property
    def version(self) -> int | None:
        """The version that is served; None before the first commit."""
        return self._version

    async def close(self) -> None:
        """Stop the server, if it is a child."""
        await self._disconnect()
        self._server.close()

    @property
    def takes_patches(self) -> bool:
        """Implements Engine.takes_patches."""
        return True

    @property
    def generating_arithmetic(self) -> Arithmetic:
        """Implements Engine.generating_arithmetic."""
        return self.checking_arithmetic

    @property
    def checking_arithmetic(self) -> Arithmetic:
        """Implements Engine.checking_arithmetic."""
        return arithmetic_of("vllm", str(self._dtype).removeprefix("torch."))

    async def stage(self, version: int, weights: Weights) -> None:
        """Prepare a policy beside the one that is served; whole weights travel through a file.

        Raises:
            EngineError: a tensor is missing, unknown or of another shape, or vLLM refuses it.
        """
        check_fit(self._model, weights)
        async with self._control:
            self._staged = None
            path = await self._on_disk(self._checkpoints.write_weights, version, weights)
            digest = await self._run_sync(digest_weights, weights)
            await self._repeat(lambda client: self._stage(client, "stage_weights", version, digest, path))
            self._checkpoints.stage_weights(version, digest, path)
            self._staged = version

    async def stage_patch(self, version: int, patch: bytes, manifest: Manifest) -> None:
        """Prepare the version that a patch leads to; it is decoded inside of vLLM, beside the serving.

        Raises:
            EngineError: the patch is for other weights, or vLLM refuses it; the current policy still serves.
        """
        async with self._control:
            if self._version is None:
                raise EngineError("a patch needs a version that serves")
            self._staged = None
            await self._on_disk(self._checkpoints.compact)
            path = await self._on_disk(self._checkpoints.write_patch, version, patch)
            await self._repeat(lambda client: self._stage(client, "stage_patch", version, manifest.weights, path))
            self._checkpoints.stage_patch(version, manifest.weights, path)
            self._staged = version

    async def commit(self) -> None:
        """Serve the staged policy from the next request on.

        Raises:
            EngineError: nothing is staged, or the swap failed and the old policy still serves.
        """
        async with self._control:
            if self._staged is None:
                raise EngineError("nothing is staged")
            version, self._staged = self._staged, None
            async with self._gate.exclusive():
                await self._commit(version)

    async def _commit(self, version: int) -> None:
        client = await self._connected()
        try:
            await self._swap(client, version)
            self._commits += 1
            due = self._commits % self._limits.verify_interval == 0
        except RefusedCommandError as error:
            if error.poisoned:
                await self._restart(client, error)
            raise EngineError(f"version {version} was not committed: {error}") from error
        except BrokenEngineError as error:
            self._checkpoints.commit()
            await self._restart(client, error)
            due = False
        else:
            self._checkpoints.commit()
        self._version, self._head = version, None
        if due:
            await self._verify()

    async def verify(self) -> None:
        """Read all tensors back from the engine's memory and compare them with the served version's digest.

        Raises:
            EngineError: they differed, and a reload did not help.
        """
        async with self._control:
            await self._verify()

    async def _verify(self) -> None:
        serving = self._checkpoints.serving
        if serving is None:
            raise EngineError("no policy has been committed")
        client = await self._connected()
        try:
            states = await client.finish("verify", version=serving.version, digest=serving.digest.hex())
            self._report("engine-verified", version=serving.version, seconds=round(float(states[0]["seconds"]), 3))
        except (RefusedCommandError, BrokenEngineError) as error:
            await self._restart(client, error)

    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        """Sample one completion for each request, in order; vLLM batches them as they come.

        Raises:
            EngineError: no policy is served, or vLLM failed again after a restart.
            ValueError: a prompt without tokens, a seed that is not 16 bytes, or a token id outside the vocabulary.
        """
        self._check_ids([request.prompt for request in requests])
        if any(len(request.seed) != sampling.SEED_BYTES for request in requests):
            raise ValueError(f"a seed has {sampling.SEED_BYTES} bytes")
        calls = [GenerationCall(self._id(), request.prompt, request.seed, params, self._states) for request in requests]
        return await self._answered(calls)

    async def greedy(self, prompts: Sequence[Tokens], params: SamplingParams) -> list[Tokens]:
        """Return the most likely completion of each prompt, in order.

        Raises:
            EngineError, ValueError: as for `generate`.
        """
        self._check_ids(prompts)
        calls = [GenerationCall(self._id(), prompt, None, params, states=False) for prompt in prompts]
        return [generation.tokens for generation in await self._answered(calls)]

    async def forward(self, prompts: Sequence[Tokens], completions: Sequence[Tokens]) -> list[Forward]:
        """Prefill each prompt with its completion, in order.

        Raises:
            EngineError: no policy is served, or vLLM failed again after a restart.
            ValueError: a prompt without tokens, or a token id outside the vocabulary.
        """
        self._check_ids(prompts)
        self._check_ids(completions, empty=True)
        calls = [PrefillCall(self._id(), *pair) for pair in zip(prompts, completions, strict=True)]
        async with self._gate.shared():
            states = iter(await self._attempts([call for call in calls if call.completion], prefill_body))
            project = partial(self._project, await self._output_projection())
        width = self._width()
        return [Forward(next(states).hidden if call.completion else torch.empty(0, width), project) for call in calls]

    async def _answered(self, calls: list[GenerationCall]) -> list[Generation]:
        async with self._gate.shared():
            return await self._attempts(calls, completion_body)

    async def _attempts(self, calls: Sequence[Any], body: Callable[[Any], dict[str, object]]) -> list[Generation]:
        """Carry out calls and collect their records; after a failure restart vLLM and repeat them."""
        version = self._version
        if version is None:
            raise EngineError("no policy has been committed")
        for attempt in range(_ATTEMPTS):
            client = await self._connected()
            try:
                return await self._run_calls(client, version, calls, body)
            except BrokenEngineError as error:
                if attempt + 1 == _ATTEMPTS:
                    raise
                await self._restart(client, error)
        raise AssertionError

    async def _run_calls(
        self, client: VllmClient, version: int, calls: Sequence[Any], body: Callable[[Any], dict[str, object]]
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
            tasks.start_soon(self._watch, client)
            async with first_failure(EngineError, ValueError) as senders_group:
                for _ in range(senders):
                    senders_group.start_soon(send)
            tasks.cancel_scope.cancel()
        results: list[Generation] = []
        for begin in range(0, len(calls), _COLLECT):
            part = slice(begin, begin + _COLLECT)
            records = (await client.call("take", requests=[call.request for call in calls[part]]))[0]
            results += [
                collect(call, tokens, records.get(call.request), version)
                for call, tokens in zip(calls[part], answers[part], strict=True)
            ]
        return results

    async def _watch(self, client: VllmClient) -> None:
        """Ask for a sign of life for ever; a health check would not do, because it asks no worker.

        Raises:
            BrokenEngineError: there was none in time.
        """
        while True:
            await trio.sleep(_SIGN_OF_LIFE_SECONDS)
            await client.call("ping", self._limits.hang)

    async def _on_disk(self, function: Callable[..., T], *arguments: object) -> T:
        """Read or write files of this engine.

        Raises:
            EngineError: the disk is full or broken; the current policy still serves.
        """
        try:
            result: T = await self._run_sync(function, *arguments)
        except (OSError, SafetensorError, ProtocolError) as error:
            raise EngineError(f"the engine's files cannot be written: {error}") from error
        return result

    async def _stage(self, client: VllmClient, command: str, version: int, digest: bytes, path: Path) -> None:
        shared = await client.share(path)
        await client.finish(command, version=version, digest=digest.hex(), path=shared)

    async def _swap(self, client: VllmClient, version: int) -> None:
        """Commit a staged version between two requests.

        Raises:
            RefusedCommandError: it was not committed. BrokenEngineError: nobody knows.
        """
        try:
            with trio.fail_after(self._limits.drain):
                await client.post("/pause", mode="wait")
        except trio.TooSlowError:
            await client.post("/pause", mode="abort")
        try:
            states = await client.call("commit", version=version)
            if not all(state["verified"] for state in states):
                staged = self._checkpoints.staged
                assert staged is not None
                await client.finish("verify", version=version, digest=staged.digest.hex())
            await client.post("/reset_prefix_cache")
        finally:
            with trio.CancelScope(shield=True):
                await client.post("/resume")

    async def _repeat(self, work: Callable[[VllmClient], Awaitable[T]]) -> T:
        """Do some work of control; restart vLLM and do it again if it does not answer.

        Raises:
            EngineError: it was refused, or vLLM failed again.
        """
        client = await self._connected()
        try:
            return await work(client)
        except BrokenEngineError as error:
            await self._restart(client, error)
            return await work(await self._connected())

    async def _connected(self) -> VllmClient:
        """Return the client of a server that runs and has our tensors mapped.

        Raises:
            EngineError: it does not start, or is no server that fits.
        """
        async with self._restarting:
            return await self._connect()

    async def _connect(self) -> VllmClient:
        if self._client is None:
            await self._server.start()
            client = VllmClient(
                self._server, control_seconds=self._limits.control, connections=self._limits.connections
            )
            async with AsyncExitStack() as until_it_fits:
                until_it_fits.push_async_callback(client.close)
                for description in await self._describe(client):
                    check_description(description, self._dtype)
                shapes = {name: list(shape) for name, shape in self._model.shapes.items()}
                await client.call("map", shapes=shapes)
                until_it_fits.pop_all()
            self._client = client
        return self._client

    async def _describe(self, client: VllmClient) -> list[dict[str, Any]]:
        """Return what the ranks of a server that has started say of themselves.

        Raises:
            EngineError: they say nothing, as those of a vLLM without our code.
        """
        try:
            return await client.call("describe")
        except (RefusedCommandError, BrokenEngineError) as error:
            raise EngineError(
                f"this vLLM does not answer as a grailnode engine ({error}); start it as `grailnode engine flags` "
                "prints: without our code it cannot draw the tokens that a run's seeds require"
            ) from error

    async def _restart(self, failing_client: VllmClient, cause: Exception) -> None:
        """Kill the server, start it again, and bring the served version back into it, verified; then what was staged.

        Args:
            broken: the client that failed; nothing is done if another call has replaced it meanwhile.

        Raises:
            EngineError: it does not start, or does not take the weights.
        """
        async with self._restarting:
            if failing_client is not self._client:
                return
            self._report("engine-restarted", error=str(cause).splitlines()[0][:300])
            start = trio.current_time()
            await self._disconnect()
            self._head = None
            client = await self._connect()
            for step in self._checkpoints.steps():
                await self._stage(client, step.command, step.version, step.digest, step.path)
                states = await client.call("commit", version=step.version)
                if not all(state["verified"] for state in states):
                    await client.finish("verify", version=step.version, digest=step.digest.hex())
            await client.post("/reset_prefix_cache")
            if (staged := self._checkpoints.staged) is not None:
                await self._stage(client, staged.command, staged.version, staged.digest, staged.path)
            self._report("engine-ready", version=self._version or 0, seconds=round(trio.current_time() - start, 3))

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        await self._server.stop()  # first, so that calls under way end with its connections
        if client is not None:
            await client.close()

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

    def _width(self) -> int:
        return self._model.shapes[self._head_names()[0]][-1]

    async def _output_projection(self) -> dict[str, Tensor]:
        """Return the output projection of the served version, read back from the engine once for each version."""
        if self._head is None:
            client, head = await self._connected(), {}
            for name in self._head_names():
                bits = base64.b64decode((await client.call("tensor", name=name))[0]["bits"])
                tensor = torch.frombuffer(bytearray(bits), dtype=torch.bfloat16).reshape(self._model.shapes[name])
                head[name] = tensor.to(self._dtype)
            self._head = head
        return self._head

    def _project(self, head: dict[str, Tensor], hidden: Tensor) -> Tensor:
        with torch.inference_mode():
            return self._model.logits(head, hidden.to(self._dtype))
