"""Keeps a server of vLLM running for an engine: starts it, refuses one that does not fit, and replaces one that fails.

Invariants:
1. A client that `connected` returns is of a server that fits, has places for the policy's tensors, and has the weights
   that `restore` brings into it.
2. A failure causes one restart, however many calls notice it: each of them names the client that failed.
3. A server that fails before it is ready is ended, so that the next call starts a new one.

The worst inputs: a worker that is stopped while /health says 200 (the sign of life ends the wait); a vLLM without our
code, or in another dtype (refused before it gets a weight); a call that is cancelled while the server starts (the next
call goes on waiting for the same server).
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import torch
import trio

from grailnode.engine.vllm.inside.row_sampling import probe_draws
from grailnode.engine.vllm.installation import SUPPORTED
from grailnode.engine.vllm.vllm_client import BrokenEngineError, RefusedCommandError, VllmClient
from grailnode.engine.vllm.vllm_server import Server
from grailnode.engine.vllm.vllm_settings import EngineLimits
from roles.ports import EngineError

T = TypeVar("T")
EventReport = Callable[..., None]
"""`report(event, **fields)`, as Telemetry.event."""

INVARIANT_CAPABILITY: Final = (8, 0)  # of GPUs with vLLM's batch-invariant mode; on a CPU the first request would fail
_SIGN_OF_LIFE_SECONDS: Final = 2.0


@dataclass(eq=False)
class ServerSupervisor:
    """The server of one engine."""

    server: Server
    shapes: Mapping[str, tuple[int, ...]]  # of the policy's tensors, by name
    dtype: torch.dtype  # in which the server must compute
    limits: EngineLimits
    restore: Callable[[VllmClient], Awaitable[int | None]]  # brings the served version, if any, into a server; verified
    report: EventReport  # gets an event when a server was replaced, or draws tokens without Triton on a GPU
    _client: VllmClient | None = field(default=None, init=False)
    _distrusted: VllmClient | None = field(default=None, init=False)
    _connecting: trio.Lock = field(default_factory=trio.Lock, init=False)

    async def connected(self) -> VllmClient:
        """Return the client of a server that runs and has our weights; start it if there is none."""
        async with self._connecting:
            await self._connect()
            assert self._client is not None
            return self._client

    async def repeat(self, work: Callable[[VllmClient], Awaitable[T]], attempts: int = 2) -> T:
        """Do some work with the server; restart it after a failure, and do the work again."""
        for attempt in range(attempts):
            client = await self.connected()
            try:
                return await work(client)
            except BrokenEngineError as error:
                if attempt + 1 == attempts:
                    raise
                await self.restart(client, error)
        raise AssertionError

    async def restart(self, failing_client: VllmClient, cause: Exception) -> None:
        """Start the server again with its weights, unless another call has replaced the failing client already."""
        try:
            await self._connecting.acquire()
        except trio.Cancelled:
            self.distrust(failing_client)
            raise
        try:
            # Another call has replaced it while this one waited for the lock.
            if failing_client is not self._client:
                return
            self.report("engine-restarted", error=str(cause).splitlines()[0][:300])
            start = trio.current_time()
            # Stopping comes before connecting: two servers would share the GPU's memory.
            await self._disconnect()
            version = await self._connect()
            self.report("engine-ready", version=version or 0, seconds=round(trio.current_time() - start, 3))
        finally:
            self._connecting.release()

    def distrust(self, client: VllmClient) -> None:
        """Have the next call replace the server of a client, if no other call has done so."""
        self._distrusted = client

    async def watch(self, client: VllmClient) -> None:
        """Ask the worker for a sign of life for ever; it may hang while the HTTP server answers health checks."""
        while True:
            await trio.sleep(_SIGN_OF_LIFE_SECONDS)
            await client.call("ping", self.limits.hang)

    async def close(self) -> None:
        """End the server, if it is a child, and what it was started with."""
        await self._disconnect()
        self.server.close()

    async def _connect(self) -> int | None:
        """Have a client of a server that is ready; return the version that was brought into it, if it is a new one."""
        if self._client is not None and self._client is self._distrusted:
            await self._disconnect()
        if self._client is not None:
            return None
        await self.server.start()
        client = VllmClient(self.server, control_seconds=self.limits.control, connections=self.limits.connections)
        # A server that cannot be made ready is stopped, so that the next attempt starts a fresh one.
        async with AsyncExitStack() as until_ready:
            until_ready.push_async_callback(client.aclose)
            try:
                version = await self._make_ready(client)
            except BrokenEngineError:
                await self.server.stop()
                raise
            until_ready.pop_all()
        self._client = client
        return version

    async def _make_ready(self, client: VllmClient) -> int | None:
        """Check a server that has started, find the places of the tensors, and bring the weights into them."""
        try:
            descriptions = await client.call("describe")
        except (RefusedCommandError, BrokenEngineError) as error:
            raise BrokenEngineError(
                f"this vLLM does not answer as a grailnode engine ({error}); start it as `grailnode engine flags` "
                "prints: without our code it cannot draw the tokens that a run's seeds require"
            ) from error
        # Ranks may run on different GPUs, so each of them is checked.
        for description in descriptions:
            check_description(description, self.dtype)
        if fault := descriptions[0]["triton_fault"]:
            self.report("triton-unusable", error=fault)
        # A commit whose connection was lost may have left it paused.
        await client.post("/resume")
        # Only now: a server that does not fit gets no weight of ours.
        await client.call("map", shapes={name: list(shape) for name, shape in self.shapes.items()})
        return await self.restore(client)

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        await self.server.stop()  # first, so that calls under way end with its connections
        if client is not None:
            await client.aclose()


def check_description(description: dict[str, Any], dtype: torch.dtype) -> None:
    """Raise EngineError if what a worker of a server says of itself does not fit."""
    try:
        faults = _faults(SimpleNamespace(**description), dtype)
    except AttributeError as error:
        raise EngineError(f"this server of vLLM has the code of another version of grailnode: {error}") from error
    for is_found, fault in faults:
        if is_found:
            raise EngineError(f"this server of vLLM does not fit: {fault}")


def _faults(worker: SimpleNamespace, dtype: torch.dtype) -> Sequence[tuple[object, str]]:
    """Return the faults that a worker may have, each with whether it has it."""
    numbers = worker.vllm.split(".")[:2]
    version = tuple(int(number) if number.isdigit() else 0 for number in numbers)
    low, high, least = (".".join(map(str, bound)) for bound in (*SUPPORTED, INVARIANT_CAPABILITY))
    expected, probe = str(dtype).removeprefix("torch."), probe_draws(torch.device("cpu"))

    has_invariant_mode = tuple(worker.capability or ()) >= INVARIANT_CAPABILITY
    return (
        (not SUPPORTED[0] <= version < SUPPORTED[1], f"vLLM {worker.vllm}; versions from {low} to below {high} fit"),
        # Before the checks of the model: a stage of a pipeline has only a part of it.
        (
            worker.pipeline_parallel > 1,
            f"--pipeline-parallel-size {worker.pipeline_parallel}: pipeline parallelism is not supported: one GPU has "
            "only some layers; drop it, and set engine.ranks to divide each layer among several GPUs",
        ),
        (
            worker.data_parallel > 1,
            f"--data-parallel-size {worker.data_parallel}: data parallelism is not supported: only one of the copies "
            "of the model would answer the node; drop it, and set engine.replicas instead",
        ),
        (worker.dtype != expected, f"it computes in {worker.dtype}, and engine.dtype is {expected}"),
        (
            worker.head != "float32",
            f"it computes logits in {worker.head}, and margins need float32: start it with "
            """--hf-overrides '{"head_dtype": "float32"}'""",
        ),
        (
            worker.matmul != "highest",
            f"VLLM_FLOAT32_MATMUL_PRECISION is {worker.matmul}, which computes float32 from fewer bits: unset it",
        ),
        (worker.quantization, f"it serves {worker.quantization}-quantized weights, which cannot be patched in place"),
        (
            worker.cache not in ("auto", expected),
            f"it keeps keys and values in {worker.cache}, not in {expected}: drop --kv-cache-dtype, or set it to that",
        ),
        (not worker.processor, "it has not loaded our logits processor; start it as `grailnode engine flags` prints"),
        (worker.speculative, "speculative decoding gives a request several rows a step, which is not supported"),
        (
            worker.batch_invariant and not has_invariant_mode,
            f"VLLM_BATCH_INVARIANT is set, and it computes on {worker.device}: vLLM has that mode for GPUs of compute "
            f"capability {least} and more",
        ),
        (worker.probe != probe, f"its noise has other bits: it drew {worker.probe} where {probe} is right"),
    )
