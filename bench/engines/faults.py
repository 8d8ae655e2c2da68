"""Faults of the processes, of memory, of the disk and of patches, while rollouts are under way.

The rollouts that come in the end are compared with those of the torch engine. For each fault of a process there is the
time until the engine noticed it, the time from there until the restarted engine had its verified weights, and the time
until all rollouts were there.
"""

import argparse
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import trio

from bench.engines.setting import cache_flags, directory, report, requests_of, with_changes
from grailnode.engine.models import build
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from grailnode.engine.torch_engine import TorchEngine
from grailnode.engine.vllm.vllm_engine import VllmEngine
from grailnode.engine.vllm.vllm_server import ChildServer
from grailnode.engine.vllm.vllm_settings import EngineLimits, VllmSettings
from protocol.chain.manifest import Manifest
from protocol.digest import digest_weights
from protocol.patch import encode
from protocol.rollout.sampling import SamplingParams
from roles.ports import EngineError, Request

WORKER, CORE, SERVER = "VLLM::Worker", "VLLM::EngineCor", "python"
_SHARE = 0.01


class Trial:
    """One engine with its expected rollouts, and the events that it reported."""

    def __init__(
        self, python: Path, place: Path, rollouts: int, hang: float, device: str = "cpu", share: float = 0.4
    ) -> None:
        policy = Policy.load(PACKAGED_POLICY)
        self.model = build(policy)
        self.params = SamplingParams(1.0, 24, policy.stops)
        self.requests: list[Request] = requests_of(rollouts, self.model.vocabulary, 8)
        self.weights = load_weights(PACKAGED_POLICY)
        settings = VllmSettings(python=python, device=device, memory_share=share, flags=cache_flags(device))
        self.server = ChildServer(settings, policy.directory, place / "server")
        self.reference = TorchEngine(self.model)
        self.events: dict[str, tuple[float, dict[str, Any]]] = {}
        limits = EngineLimits(hang=hang)
        self.engine = VllmEngine(self.model, self.server, place / "engine", limits=limits, report=self._report)

    def _report(self, event: str, **fields: Any) -> None:
        self.events[event] = time.perf_counter(), fields

    async def begin(self) -> None:
        """Serve the packaged policy with both engines."""
        for engine in (self.reference, self.engine):
            await engine.stage(0, self.weights)
            await engine.commit()

    async def expected(self) -> list[tuple[int, ...]]:
        """Return the torch engine's rollouts."""
        return [g.tokens for g in await self.reference.generate(self.requests, self.params)]

    async def disturbed(self, fault: Callable[[], None], after: float) -> dict[str, Any]:
        """Generate, cause a fault meanwhile, and return what came of it."""
        expected, tokens = await self.expected(), list[tuple[int, ...]]()
        self.events.clear()

        async def generate() -> None:
            tokens.extend(g.tokens for g in await self.engine.generate(self.requests, self.params))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            await trio.sleep(after)
            moment = time.perf_counter()
            fault()
        result: dict[str, Any] = {
            "rollouts": len(tokens),
            "wrong": sum(a != b for a, b in zip(expected, tokens, strict=True)),
            "seconds_until_repeated": round(time.perf_counter() - moment, 1),
        }
        if "engine-restarted" in self.events:
            result["seconds_until_noticed"] = round(self.events["engine-restarted"][0] - moment, 1)
            result["restart_seconds"] = round(float(self.events["engine-ready"][1]["seconds"]), 1)
        await self.engine.verify()
        return result

    def manifest(self, version: int, weights: dict[str, Any]) -> Manifest:
        """Return a manifest of which only the digest of the weights matters."""
        return Manifest.model_construct(version=version, weights=digest_weights(weights))


async def faults(python: Path, arguments: argparse.Namespace) -> None:
    """Cause each fault, and report what came of it."""
    with directory() as place:
        trial = Trial(python, place, arguments.rollouts, arguments.hang, arguments.device)
        try:
            await trial.begin()
            for name, number in (("SIGKILL", signal.SIGKILL), ("SIGSTOP", signal.SIGSTOP)):
                for process in (WORKER, CORE, SERVER):
                    result = await trial.disturbed(_signal(trial.server, process, number), 0.5)
                    report(kind="faults", fault=name, process=process, **result)
            result = await trial.disturbed(_no_memory(trial.server), 0.5)
            report(kind="faults", fault="no memory", process=WORKER, **result)
            await _full_disk(trial)
            await _bent_patches(trial, arguments.patches)
        finally:
            await trial.engine.close()


def _signal(server: ChildServer, process: str, number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(process_of(server, process), number)


def _no_memory(server: ChildServer) -> Callable[[], None]:
    """Forbid the worker any further memory: its next allocation fails as on a machine without any."""

    def fault() -> None:
        worker = process_of(server, WORKER)
        pages = int(Path(f"/proc/{worker}/statm").read_text().split()[0])
        limit = pages * resource.getpagesize()
        resource.prlimit(worker, resource.RLIMIT_AS, (limit, limit))

    return fault


async def _full_disk(trial: Trial) -> None:
    """Stage whole weights and a patch where no file may grow: both are refused, and the old version serves."""
    target = with_changes(trial.weights, _SHARE, 2)
    patch, manifest = encode(trial.weights, target), trial.manifest(1, target)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (min(len(patch) // 2, 1024), hard))
    messages = []
    try:
        for stage in (trial.engine.stage(1, target), trial.engine.stage_patch(1, patch, manifest)):
            try:
                await stage
            except EngineError as error:
                messages.append(str(error).splitlines()[0][:120])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    result = await _rollouts(trial)
    report(kind="faults", fault="disk full at staging", refused=len(messages), of=2, **result, messages=messages)


async def _bent_patches(trial: Trial, count: int) -> None:
    """Stage patches of which one bit or byte was bent after their digest was checked, and commit what is accepted."""
    generator = random.Random(0)
    weights, version = trial.weights, 0
    refused = accepted = 0
    wrong = 0
    for _ in range(count):
        target = with_changes(weights, _SHARE, generator.randrange(1 << 30))
        patch = bytearray(encode(weights, target))
        place = generator.randrange(len(patch))
        patch[place] ^= generator.choice([1 << generator.randrange(8), generator.randrange(1, 256)])
        manifest = trial.manifest(version + 1, target)
        try:
            await trial.engine.stage_patch(version + 1, bytes(patch), manifest)
        except EngineError:
            refused += 1
            continue
        await trial.engine.commit()  # what was bent does not matter: the weights have the signed digest
        await trial.engine.verify()
        await trial.reference.stage_patch(version + 1, encode(weights, target), manifest)
        await trial.reference.commit()
        accepted, version, weights = accepted + 1, version + 1, target
        wrong += (await _rollouts(trial))["wrong"]
    result = await _rollouts(trial)
    result["wrong"] += wrong
    report(kind="faults", fault="bent patches", patches=count, refused=refused, harmless=accepted, **result)


async def _rollouts(trial: Trial) -> dict[str, Any]:
    """Return how many rollouts are wrong now, after reading the weights back."""
    await trial.engine.verify()
    tokens: Sequence[tuple[int, ...]] = [g.tokens for g in await trial.engine.generate(trial.requests, trial.params)]
    wrong = sum(a != b for a, b in zip(await trial.expected(), tokens, strict=True))
    return {"rollouts": len(tokens), "wrong": wrong}


def process_of(server: ChildServer, name: str) -> int:
    """Return the id of a process of a server's group by the beginning of its name."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "comm").read_text().strip()
            except OSError:
                continue
            if int(fields[2]) == server.process_id and command.startswith(name):
                return int(entry.name)
    raise LookupError(name)
