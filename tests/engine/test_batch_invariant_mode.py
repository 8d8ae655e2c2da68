"""vLLM's batch-invariant mode, with the real vLLM on a CPU, which has none."""

from pathlib import Path

import pytest

from grailnode.engine.models import build
from grailnode.engine.vllm.vllm_engine import VllmEngine
from grailnode.engine.vllm.vllm_server import ChildServer, ServerSettings
from roles.ports import EngineError
from tests.engine.vllm_site import vllm_python
from tests.support.builders.policies import random_weights, write_policy

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


async def test_it_is_refused_on_a_cpu_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check the server would take the weights, and fail at the first request."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    policy = write_policy(tmp_path / "policy", head_dim=32)
    model = build(policy)
    settings = ServerSettings(vllm_python(), policy.directory, tmp_path / "server", sequences=8)
    engine = VllmEngine(model, ChildServer(settings), tmp_path / "engine")
    try:
        with pytest.raises(EngineError, match="VLLM_BATCH_INVARIANT is set, and it computes on cpu"):
            await engine.stage(0, random_weights(model))
    finally:
        await engine.close()
