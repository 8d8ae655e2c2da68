"""vLLM's model runner V2 serves, is patched in place, and draws the tokens of the torch engine.

V2 needs Triton, whose published builds compile for GPUs only. On a CPU this runs V2's kernels in Triton's interpreter:
slow, but the same runner, scheduler and sampler as on a GPU. `pip install --target DIR triton==3.8.0` makes the folder
that GRAILNODE_TRITON names.
"""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from grailnode.engine.models import build
from grailnode.engine.policy import Policy
from grailnode.engine.vllm.vllm_engine import VllmEngine
from grailnode.engine.vllm.vllm_server import ChildServer
from grailnode.engine.vllm.vllm_settings import VllmSettings
from protocol.rollout.filters import Filters
from protocol.rollout.sampling import SamplingParams
from roles.policy.causal_model import CausalModel
from tests.engine.engine_contract import changed, check_like_torch, serve
from tests.engine.vllm_site import (
    SHORT_MEMORY,
    BendableServer,
    check_preempted,
    check_refusal,
    refuse_restarts,
    vllm_python,
)
from tests.support.builders.policies import PARAMS, random_weights

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

FILTERED = SamplingParams(temperature=0.7, max_tokens=6, stops=(1,), filters=Filters(top_k=9, top_p=0.9, min_p=0.01))
CPU_BACKEND = """
import triton.backends

class Driver:
    is_active = staticmethod(lambda: True)

class Backend:
    driver = Driver

triton.backends.backends["cpu"] = Backend  # vLLM looks for it; the interpreter needs none
"""


class InterpretedServer(BendableServer):
    """A server whose Triton kernels are interpreted."""

    def environment(self) -> dict[str, str]:
        own = super().environment()
        site = self.log.parent / "site"
        (site / "sitecustomize.py").write_text(CPU_BACKEND)
        paths = os.pathsep.join((own["PYTHONPATH"], str(triton_site())))
        return own | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}


def triton_site() -> Path:
    """Return the folder with Triton, or skip the test."""
    path = Path(os.environ.get("GRAILNODE_TRITON", ""))
    if not (path / "triton").is_dir():
        pytest.skip("GRAILNODE_TRITON names no folder with Triton; `pip install --target DIR triton==3.8.0` makes one")
    return path


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def server(
    policy: Policy, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[InterpretedServer]:
    triton_site()
    settings = VllmSettings(python=vllm_python(), runner="v2", sequences=16, flags=SHORT_MEMORY)
    server = InterpretedServer(settings, policy.directory, tmp_path_factory.mktemp("server"), ahead=request.param)
    yield server
    server.end()


@pytest.fixture
async def engine(model: CausalModel, server: InterpretedServer, tmp_path: Path) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(model, server, tmp_path, report=refuse_restarts)
    yield engine
    await engine.close()


async def test_runner_v2_is_patched_and_generates_as_the_torch_engine(engine: VllmEngine, model: CausalModel) -> None:
    weights = random_weights(model)
    target = changed(weights, 1)
    await serve(engine, weights, target)
    await engine.verify()
    for params in (PARAMS, FILTERED):
        await check_like_torch(engine, model, target, params)


async def test_requests_that_runner_v2_computes_again_are_those_of_torch(
    engine: VllmEngine, model: CausalModel, server: InterpretedServer
) -> None:
    await serve(engine, random_weights(model))
    await check_preempted(engine, server, model, count=24)


# vLLM's batch-invariant mode, with the real vLLM on a CPU, which has none


async def test_it_is_refused_on_a_cpu_by_name(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check the server would take the weights, and fail at the first request."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    model = build(policy)
    server = ChildServer(VllmSettings(python=vllm_python(), sequences=8), policy.directory, tmp_path / "server")
    engine = VllmEngine(model, server, tmp_path / "engine")
    await check_refusal(engine, random_weights(model), "VLLM_BATCH_INVARIANT is set, and it computes on cpu")
