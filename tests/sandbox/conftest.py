"""A real sandbox. Tests that need it are skipped where this machine cannot create one."""

import pytest

from grailnode.sandbox import BubblewrapSandbox
from tests.support.builders.tasks import open_sandbox


@pytest.fixture(scope="session")
def sandbox() -> BubblewrapSandbox:
    return open_sandbox()
