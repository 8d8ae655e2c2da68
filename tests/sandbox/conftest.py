"""A real sandbox. Tests that need it are skipped where this machine cannot create one."""

import sys

import pytest

from grailnode.sandbox import BubblewrapSandbox
from protocol.environments.base import SandboxError

OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture(scope="session")
def sandbox() -> BubblewrapSandbox:
    try:
        return BubblewrapSandbox.open(OWN)
    except SandboxError as error:
        pytest.skip(str(error))
