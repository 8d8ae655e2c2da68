"""Real sandboxes on this machine's own Python."""

import sys
from typing import Final

import pytest

from grailnode.sandbox import BubblewrapSandbox
from protocol.environments.base import SandboxError

OWN: Final = f"{sys.version_info[0]}.{sys.version_info[1]}"
"""The version of this Python, as environments of programs name it."""


def open_sandbox() -> BubblewrapSandbox:
    """Return a sandbox, or skip the test that asks where this machine cannot create one."""
    try:
        return BubblewrapSandbox.open(OWN)
    except SandboxError as error:
        pytest.skip(str(error))
