"""The vLLM engine, with the real vLLM: the contract of Engine, equality with the torch engine, patches in place."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
import trio

from grailnode.engine.compute import Compute, open_engine
from grailnode.engine.policy import Policy
from grailnode.engine.vllm import vllm_engine
from grailnode.engine.vllm.vllm_engine import VllmEngine
from grailnode.engine.vllm.vllm_server import ExternalServer
from grailnode.engine.vllm.vllm_settings import VllmSettings
from protocol.patch import encode
from protocol.quantization import Precision, is_code, quantize
from protocol.rollout import sketch
from protocol.rollout.sampling import SamplingParams
from protocol.rollout.sketch import SketchKey, SketchKind
from roles.policy.causal_model import CausalModel
from roles.ports import Engine, EngineError, Request
from tests.engine.engine_contract import EngineContract, NewEngine, changed, check_tokens, manifest, serve, serving
from tests.engine.vllm_site import BendableServer, refuse_restarts, shared_server, url_of
from tests.support.builders.policies import NOISE, PARAMS, engine_of, random_weights, requests_of_many_lengths
from tests.support.processes.command_line import run_command

pytestmark = pytest.mark.vllm

as_on_a_gpu = pytest.mark.parametrize("server", [True], indirect=True, ids=["async"])
"""For tests of weights, which the way to schedule does not touch."""


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def server(
    policy: Policy, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[BendableServer]:
    """Return a server of the policy that all tests share; one that schedules as on a CPU, and one as on a GPU."""
    server = shared_server(policy.directory, tmp_path_factory.mktemp("server"), ahead=request.param)
    yield server
    server.end()


@pytest.fixture
async def new_engine(model: CausalModel, server: BendableServer, tmp_path: Path) -> AsyncIterator[NewEngine]:
    """Make engines on the shared server; the last one controls it."""
    engines: list[VllmEngine] = []

    def make() -> VllmEngine:
        engines.append(VllmEngine(model, server, tmp_path / str(len(engines)), report=refuse_restarts))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.close()


class TestVllmEngine(EngineContract):
    samples = 1000


@pytest.mark.parametrize("kind", ["projection", "topk"])
async def test_sketches_are_those_of_the_states(model: CausalModel, new_engine: NewEngine, kind: SketchKind) -> None:
    engine, key = await serving(new_engine, random_weights(model)), SketchKey(kind, bytes(range(32)))
    requests = requests_of_many_lengths()
    with_states = await engine.generate(requests, PARAMS)
    for before, after in zip(
        with_states, await engine.generate([replace(item, sketch=key) for item in requests], PARAMS), strict=True
    ):
        assert (after.tokens, after.hidden.numel()) == (before.tokens, 0)
        # The batches of the two calls differ, and with them the last bits.
        assert after.logprobs == pytest.approx(before.logprobs, abs=NOISE)
        assert sketch.distances(after.sketch, sketch.commit(kind, before.hidden, key.seed)).max() <= 1


@as_on_a_gpu
async def test_a_server_of_somebody_else_is_patched_and_generates(
    model: CausalModel, server: BendableServer, tmp_path: Path
) -> None:
    weights = random_weights(model)
    target = changed(weights, 1)
    await server.start()
    async with url_of(server) as url:
        engine = VllmEngine(model, ExternalServer(url), tmp_path)
        await serve(engine, weights, target)
        await engine.verify()
        await check_tokens(engine, model, target)
        await engine.close()
    # what was uploaded does not stay on the disk
    assert not [*Path(server.socket).parent.rglob("*-[01]-[12]")]


@as_on_a_gpu
async def test_requests_of_others_keep_no_keys_of_other_weights_when_an_engine_is_restored(
    model: CausalModel, new_engine: NewEngine, server: BendableServer, tmp_path: Path
) -> None:
    old, request = random_weights(model), Request((5, 6, 7, 8) * 50, bytes(16))
    new = changed(old, 1, 0.3)
    engine = VllmEngine(model, server, tmp_path)
    await serve(engine, old, new)
    await serving(new_engine, old)
    async with server.client(60.0, 3) as client, trio.open_nursery() as nursery:

        async def ask(max_tokens: int, *, task_status: trio.TaskStatus[None]) -> None:
            values = {"temperature": 0, "ignore_eos": True, "max_tokens": max_tokens}
            body = {"token_ids": request.prompt, "sampling_params": values}
            for number in count():
                (await client.post("/inference/v1/generate", json=body)).raise_for_status()
                if number == 0:
                    task_status.started()

        for max_tokens in (30, 40, 50):  # so that one of them is always under way
            await nursery.start(ask, max_tokens)
        await engine._server.restart(await engine._server.connected(), EngineError("the connection was lost"))
        nursery.cancel_scope.cancel()
    (generation,) = await engine.generate([request], PARAMS)
    (expected,) = await (await engine_of(model, new)).generate([request], PARAMS)
    torch.testing.assert_close(generation.hidden, expected.hidden, rtol=0, atol=NOISE)


@as_on_a_gpu
async def test_tensors_that_were_changed_in_memory_are_named_on_demand(
    policy: Policy, model: CausalModel, server: BendableServer, tmp_path: Path
) -> None:
    assert run_command("init", str(tmp_path / "run")).returncode == 0
    run, directory = tmp_path / "run" / "run.toml", tmp_path / "run" / "state" / "miner-1" / "engine"
    ask = partial(run_command, "engine", "verify", "--run", str(run), "--name", "miner-1")
    weights = random_weights(model)
    target = changed(weights, 1)
    await server.start()
    async with url_of(server) as url:
        compute = Compute(model, vllm=VllmSettings(url=url), policy=policy.directory, directory=directory)
        async with open_engine(compute, trio.to_thread.run_sync, lambda event, **fields: None) as engine:
            result = await trio.to_thread.run_sync(ask)
            assert result.stderr == "grailnode: miner-1: nothing was verified: no policy has been committed\n"
            await serve(engine, weights, target)
            result = await trio.to_thread.run_sync(ask)
            assert result.stdout.startswith("miner-1: version 1 equals its signed weights: ")
            names = ("model.layers.0.self_attn.k_proj.weight", "model.norm.weight")
            await server.bend(*names)
            result = await trio.to_thread.run_sync(ask)
            assert result.returncode == 1
            assert f"tensors: {', '.join(names)}; vLLM was started again" in result.stderr
            assert (await trio.to_thread.run_sync(ask)).returncode == 0
            await check_tokens(engine, model, target)


class TestPatches:
    @as_on_a_gpu
    async def test_after_many_patches_whole_weights_replace_them(
        self, model: CausalModel, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A restarted engine need not apply all patches of a run."""
        monkeypatch.setattr(vllm_engine, "MAX_PATCHES", 1)
        versions = [random_weights(model)]
        engine = await serving(new_engine, versions[0])
        assert isinstance(engine, VllmEngine)
        for number in range(1, 3):
            versions.append(changed(versions[-1], number))
        takes_patches = [engine.takes_patches]
        await engine.stage_patch(1, encode(*versions[:2]), manifest(1, versions[1]))
        await engine.commit()
        takes_patches.append(engine.takes_patches)
        await engine.stage(2, versions[2])
        await engine.commit()
        assert [*takes_patches, engine.takes_patches] == [True, False, True]
        await engine.verify()
        await check_tokens(engine, model, versions[2])

    async def test_a_commit_waits_for_the_calls_under_way(self, model: CausalModel, new_engine: NewEngine) -> None:
        weights = random_weights(model)
        engine, reference = await serving(new_engine, weights), await engine_of(model, weights)
        target = changed(weights, 1, 0.5)
        await engine.stage_patch(1, encode(weights, target), manifest(1, target))
        requests = requests_of_many_lengths(64)
        long = SamplingParams(temperature=1.0, max_tokens=40, stops=(31,))
        results: list[list[tuple[int, ...]]] = []

        async def generate(engine: Engine, requests: list[Request]) -> None:
            results.append([g.tokens for g in await engine.generate(requests, long)])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate, engine, requests)
            await trio.sleep(0.2)
            nursery.start_soon(engine.commit)
        assert results == [[g.tokens for g in await reference.generate(requests, long)]]
        assert engine.version == 1


@as_on_a_gpu
@pytest.mark.parametrize("precision", ["fp8", "int8"])
async def test_codes_are_served_as_the_values_that_they_stand_for(
    model: CausalModel, new_engine: NewEngine, precision: Precision
) -> None:
    versions = [quantize(random_weights(model, seed), precision) for seed in (0, 1)]
    engine = await serving(new_engine, versions[0])
    assert isinstance(engine, VllmEngine)
    assert not engine.takes_patches
    before = await check_tokens(engine, model, versions[0])
    await engine.stage(1, versions[1])
    await engine.commit()
    assert before != await check_tokens(engine, model, versions[1])
    assert (await engine.verify()).tensors == len(model.shapes)
    name, codes = next((name, tensor) for name, tensor in versions[1].items() if is_code(tensor))
    no_codes = torch.full(codes.shape, 0x7F if precision == "fp8" else 0x80, dtype=torch.uint8).view(codes.dtype)
    with pytest.raises(EngineError, match="no code"):
        await engine.stage(2, versions[1] | {name: no_codes})
    await check_tokens(engine, model, versions[1])
