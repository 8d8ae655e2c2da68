"""The policies that the engine's tests share."""

from pathlib import Path

import pytest

from grailnode.engine.hf import TransformersModel
from grailnode.engine.models import build
from grailnode.engine.policy import Policy
from roles.policy.causal_model import CausalModel
from tests.support.builders.policies import write_policy


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("policy")
    write_policy(path)
    return path


@pytest.fixture(scope="session", params=["qwen3", "transformers"])
def model(request: pytest.FixtureRequest, directory: Path) -> CausalModel:
    """Return the same policy in each implementation of CausalModel."""
    if request.param == "transformers":
        return TransformersModel(directory)
    return build(Policy.load(directory))


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """Return a policy with random weights whose heads are as wide as vLLM's attention needs."""
    return write_policy(tmp_path_factory.mktemp("policy"), head_dim=32)
