"""The engine of a node that computes with vLLM (implements roles.ports.Engine); the package's docstring has its rules.

Weights are staged beside the serving, committed between two requests, verified and restored: `stage` or `stage_patch`,
then `commit`; `verify` at any time. Completions and checks are sent to vLLM all at once, and their answers are checked
against the engine's own records. The server's life is in server_supervisor.py.

Invariants:
1. The version in use does not change: a commit waits for the calls that use it, and later calls for the commit.
2. A version serves only after every tensor in the engine's memory had the digest that the trainer signed, and after
   vLLM was seen to compute with a checkpoint as torch does.
3. What serves can be restored from this machine's disk, where a version's file is complete before it is staged.
4. Stage, commit and verification exclude each other.

The worst inputs: a commit of which nobody knows whether it was carried out (the server is restarted with the new
version); weights that were damaged (restarted with the same); a full disk at staging (refused, the old version serves);
a server that fails while it takes a version (restarted, and asked once more).
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final, Literal, TypeVar

import torch
import trio

from grailnode.engine.lora_model import LoraModel, initial_adapters
from grailnode.engine.models import check_fit
from grailnode.engine.torch_engine import RunSync
from grailnode.engine.version_gate import VersionGate
from grailnode.engine.vllm.checkpoints import Checkpoints, RecoveryStep
from grailnode.engine.vllm.inside import adapters
from grailnode.engine.vllm.layout_check import PARAMS, check_layout, probes
from grailnode.engine.vllm.server_supervisor import EventReport, ServerSupervisor
from grailnode.engine.vllm.verify_requests import Verification
from grailnode.engine.vllm.vllm_client import (
    BrokenEngineError,
    Call,
    CheckCall,
    GenerationCall,
    RefusedCommandError,
    VllmClient,
)
from grailnode.engine.vllm.vllm_server import Server
from grailnode.engine.vllm.vllm_settings import EngineLimits
from protocol.chain.manifest import Manifest
from protocol.digest import Weights, digest_weights
from protocol.errors import MalformedError
from protocol.proof import arithmetic_of
from protocol.quantization import dequantize, is_code
from protocol.rollout import sampling
from protocol.rollout.checking import Check, CheckRules
from protocol.rollout.sampling import SamplingParams
from roles.gather import first_failure
from roles.policy.causal_model import CausalModel
from roles.policy.sequences import check_ids
from roles.ports import CheckRequest, EngineError, Generation, Request

_ATTEMPTS: Final = 3
_COLLECT: Final = 64  # records in one answer

MAX_PATCHES: Final = 64
"""Patches behind a checkpoint before whole weights replace them, so that a restart takes no longer after weeks."""

Result = TypeVar("Result")


class VllmEngine:
    """Samples from a policy and checks completions, with vLLM."""

    def __init__(
        self,
        model: CausalModel,
        server: Server,
        directory: Path,
        *,
        dtype: torch.dtype = torch.float32,
        limits: EngineLimits | None = None,
        run_sync: RunSync = trio.to_thread.run_sync,
        report: EventReport = lambda event, **fields: None,
    ) -> None:
        self.arithmetic = arithmetic_of("vllm", str(dtype).removeprefix("torch."))
        self._model = model
        self._limits = limits or EngineLimits()
        # The weights that never change in a LoRA run; what is staged and committed are its adapters.
        self._base = model.base if isinstance(model, LoraModel) else None
        shapes = model.shapes if self._base is None else {name: tensor.shape for name, tensor in self._base.items()}
        self._target: dict[str, object] = {} if self._base is None else {"model": adapters.NAME}
        self._server = ServerSupervisor(server, shapes, dtype, self._limits, self._restore, report)
        self._checkpoints = Checkpoints(directory)
        self._base_steps: list[RecoveryStep] = []  # the base, and adapters that the layout is checked with
        self._run_sync = run_sync
        self._report = report
        self._commits = 0
        self._has_codes = False  # whether patches are for codes, which vLLM does not have
        self._control = trio.Lock()
        self._gate = VersionGate()
        self._next_request = 0
        self._abandoned: set[str] = set()
        """Requests whose records may be left in the worker: their calls were cancelled, or failed beside another."""

    @property
    def version(self) -> int | None:
        serving = self._checkpoints.serving
        return None if serving is None else serving.version

    @property
    def takes_patches(self) -> bool:
        return not self._has_codes and len(self._checkpoints.steps) <= MAX_PATCHES

    async def close(self) -> None:
        """Stop the server, if it is a child."""
        await self._server.close()

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

    async def stage(self, version: int, weights: Weights) -> None:
        """Implements Engine.stage; the weights travel through a file, codes as the BF16 numbers that they stand for."""
        check_fit(self._model.shapes, weights)
        async with self._control:
            self._has_codes = any(map(is_code, weights.values()))
            await self._stage(lambda: self._weights_step(version, weights))

    async def stage_patch(self, version: int, patch: bytes, manifest: Manifest) -> None:
        """Implements Engine.stage_patch; the patch is decoded inside of vLLM, beside the serving."""
        async with self._control:
            if self.version is None:
                raise EngineError("a patch needs a version that serves")
            write = partial(self._checkpoints.write_patch, version, patch)
            await self._stage(lambda: self._new_step("patch", version, manifest.weights, write))

    async def commit(self) -> None:
        async with self._control:
            if self._checkpoints.staged is None:
                raise EngineError("nothing is staged")
            # Calls that use the old version end first; later ones wait until the swap is over.
            async with self._gate.exclusive():
                await self._commit(self._checkpoints.staged)

    async def verify(self) -> Verification:
        """Read all tensors back from the engine's memory; once more after a restart, if they are not the version's."""
        async with self._control:
            return await self._verify()

    async def _stage(self, write: Callable[[], Awaitable[RecoveryStep]]) -> None:
        # Whatever was staged before is gone now, even if this call fails: a commit may only follow its own stage.
        self._checkpoints.drop_staged()
        # The file is complete before the engine hears of it, so that a restart in the meantime can load it again.
        step = await write()
        # Asked once more after a restart, because a server that fails while it takes a version lost only its own copy.
        try:
            await self._server.repeat(partial(_stage, step=step))
        except BaseException:
            step.path.unlink(missing_ok=True)
            raise
        self._checkpoints.staged = step

    async def _commit(self, step: RecoveryStep) -> None:
        client, is_first = await self._server.connected(), self.version is None
        try:
            await self._swap(client, step)
        except RefusedCommandError as error:
            # The engine undid the change, or is poisoned and must load its weights again. The old version serves.
            self._checkpoints.drop_staged()
            if error.poisoned:
                await self._server.restart(client, error)
            raise EngineError(f"version {step.version} was not committed: {error}") from error
        except BrokenEngineError as error:
            # Nobody knows whether the change was carried out. The checkpoint says that it was, so the restart loads the
            # new version.
            self._checkpoints.commit()
            await self._server.restart(client, error)
            return
        self._checkpoints.commit()
        self._commits += 1
        if is_first:
            try:
                await self._server.repeat(partial(self._check_layout, step=step))
            except BaseException:
                # What was brought into the engine may not serve unchecked, and nothing else can.
                self._checkpoints.steps.pop().path.unlink(missing_ok=True)
                raise
        # Each commit checks what it changes; reading everything back finds what somebody else changed in memory.
        if self._commits % self._limits.verify_interval == 0:
            await self._verify()

    async def _swap(self, client: VllmClient, step: RecoveryStep) -> None:
        """Commit a staged version between two requests."""
        start = perf_counter()
        # Shielded where vLLM is paused or has another version than this node knows of: a validator cancels what it does
        # when the time of a window is over.
        try:
            # vLLM finishes the requests under way. If they take too long, they are aborted, and asked for again.
            try:
                with trio.fail_after(self._limits.drain):
                    await client.post("/pause", mode="wait")
            except trio.TooSlowError:
                await client.post("/pause", mode="abort")
            drained = perf_counter()
            try:
                seconds = await _commit(client, step)
            except trio.Cancelled:
                self._server.distrust(client)  # it has weights that were not read back
                raise
            with trio.CancelScope(shield=True):
                # Keys and values in the cache are those of the old version.
                await client.post("/reset_prefix_cache")
        finally:
            with trio.CancelScope(shield=True):
                await client.post("/resume")
        drain, pause = round(drained - start, 5), round(perf_counter() - drained, 5)
        self._report("engine-committed", version=step.version, seconds=round(seconds, 5), drain=drain, pause=pause)

    async def _verify(self) -> Verification:
        serving = self._checkpoints.serving
        if serving is None:
            raise EngineError("no policy has been committed")
        client = await self._server.connected()
        different: tuple[str, ...] = ()
        failure = ""
        try:
            state = await _read_back(client, serving)
        except (RefusedCommandError, BrokenEngineError) as error:
            different = error.tensors if isinstance(error, RefusedCommandError) else ()
            failure = str(error).partition("\n")[0]
            await self._server.restart(client, error)
            # After the restart everything was loaded anew; a second difference is the machine's fault and ends the
            # call.
            state = await _read_back(await self._server.connected(), serving)
        seconds = round(float(state["seconds"]), 3)
        self._report("engine-verified", version=serving.version, seconds=seconds)
        return Verification(
            serving.version, serving.digest.hex(), int(state["tensors"]), seconds, different=different, failure=failure
        )

    async def _restore(self, client: VllmClient) -> int | None:
        """Bring the served version, if any, into a server, verified, and stage again what was staged."""
        if self._base is not None:
            await self._load_base(client, self._base)
        # In the order in which they were committed: the checkpoint first, then each patch that follows it.
        for step in self._checkpoints.steps:
            await _stage(client, step)
            await _commit(client, step)
            if step.kind == "weights":
                await self._check_layout(client, step)
        if self._checkpoints.steps:
            # Nothing is paused here: requests of others that are under way would keep the cache as it is.
            await client.post("/reset_prefix_cache", reset_running_requests="true", reset_external="true")
        if self._checkpoints.staged is not None:
            await _stage(client, self._checkpoints.staged)
        return self.version

    async def _load_base(self, client: VllmClient, base: Weights) -> None:
        """Load and verify the base in a server, then have the server load adapters beside it, and check their layout.

        The first version's adapters cannot show it, because B is zero there.
        """
        if not self._base_steps:
            parts = base, initial_adapters(self._model.shapes, without_effect=False)
            self._base_steps = [await self._weights_step(0, part) for part in parts]
        base_step, adapter_step = self._base_steps
        await _stage(client, base_step)
        await _commit(client, base_step)
        await client.call("map", shapes=self._model.shapes, adapters=True)
        # vLLM takes no requests for an adapter that was not announced to it. It finds this one loaded, and so reads no
        # path; nor does it take the name a second time, if the server is one that other engines have used.
        with suppress(RefusedCommandError):
            await client.post("/v1/load_lora_adapter", {"lora_name": adapters.NAME, "lora_path": adapters.NAME})
        await _stage(client, adapter_step)
        await _commit(client, adapter_step)
        await self._check_layout(client, adapter_step)

    async def _check_layout(self, client: VllmClient, step: RecoveryStep) -> None:
        """Compare what the server computes from the checkpoint in use with the torch model (layout_check.py)."""
        requests = probes(self._model.vocabulary)
        calls = [GenerationCall(self._id(), request, PARAMS) for request in requests]
        results = await self._run_calls(step.version, calls, client)
        prompts = [request.prompt for request in requests]
        await self._run_sync(check_layout, self._model, step.path, prompts, results)

    async def _weights_step(self, version: int, weights: Weights) -> RecoveryStep:
        try:
            values = await self._run_sync(dequantize, weights)
        except MalformedError as error:
            raise EngineError(str(error)) from error
        digest = await self._run_sync(digest_weights, values)
        write = partial(self._checkpoints.write_weights, version, values)
        return await self._new_step("weights", version, digest, write)

    async def _new_step(
        self, kind: Literal["weights", "patch"], version: int, digest: bytes, write: Callable[[], Path]
    ) -> RecoveryStep:
        try:
            return RecoveryStep(kind, version, digest, await self._run_sync(write))
        except OSError as error:
            raise EngineError(f"the engine's files cannot be written: {error}") from error

    async def _answered(self, calls: Sequence[Call[Result]]) -> list[Result]:
        """Carry out calls and collect their records; after a failure of vLLM all of them are repeated."""
        async with self._gate.shared():
            if (serving := self._checkpoints.serving) is None:
                raise EngineError("no policy has been committed")
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


async def _stage(client: VllmClient, step: RecoveryStep) -> None:
    try:
        shared = await client.share(step.path)
    except OSError as error:
        raise EngineError(f"the engine's files cannot be read: {error}") from error
    await client.finish("stage", kind=step.kind, version=step.version, digest=step.digest.hex(), path=shared)


async def _commit(client: VllmClient, step: RecoveryStep) -> float:
    """Commit a staged version, and have it verified; return the seconds that the commit took. If it is cancelled, it
    has not begun, or is whole, or is whole but was not read back.
    """
    with trio.CancelScope(shield=True):
        states = await client.call("commit", version=step.version)
    # A whole checkpoint has no version before all of it was read back.
    if not all(state["verified"] for state in states):
        await _read_back(client, step)
    return max(float(state["seconds"]) for state in states)


async def _read_back(client: VllmClient, step: RecoveryStep) -> dict[str, Any]:
    """Have all tensors read back and compared with a version; return how many, and in how many seconds."""
    return (await client.finish("verify", version=step.version, digest=step.digest.hex()))[0]


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
