"""The fixtures of the calibration's tests: a small policy with random weights, and a task for it."""

import pytest

from grailnode.calibration.pairs import CalibrationTask
from grailnode.engine.policy import Policy, load_weights
from protocol import environments
from protocol.digest import Weights
from tests.support.builders.policies import PARAMS, write_policy


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def weights(policy: Policy) -> Weights:
    return load_weights(policy.directory)


def addition(seed: bytes) -> str:
    return environments.get("addition").problem(seed).prompt


@pytest.fixture(scope="session")
def work(policy: Policy) -> CalibrationTask:
    """Return a task with groups of four rollouts."""
    return CalibrationTask(policy, PARAMS, 4, addition)
