"""The policy that the engine's tests share."""

import pytest

from grailnode.engine.models import build
from grailnode.engine.policy import Policy
from roles.policy.causal_model import CausalModel
from tests.support.builders.policies import write_policy


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """Return a policy with random weights whose heads are as wide as vLLM's attention needs."""
    return write_policy(tmp_path_factory.mktemp("policy"), head_dim=32)


@pytest.fixture(scope="session")
def model(policy: Policy) -> CausalModel:
    return build(policy)
