"""Where the tests of the vLLM engine find vLLM, and the servers that they share."""

import os
from pathlib import Path

import pytest

from grailnode.engine.vllm.vllm_server import ChildServer, ServerSettings

ABSENT = "GRAILNODE_VLLM_PYTHON names no interpreter with vLLM; `grailnode engine install DIR` makes one"


def vllm_python() -> Path:
    """Return the interpreter of vLLM's environment, or skip the test."""
    path = Path(os.environ.get("GRAILNODE_VLLM_PYTHON", ""))
    if not path.is_file():
        pytest.skip(ABSENT)
    return path


class SharedServer(ChildServer):
    """A server that many engines use one after the other: an engine that is closed leaves it running."""

    async def stop(self) -> None:
        """Do nothing; `end` ends it."""

    def close(self) -> None:
        """Do nothing; `end` ends it."""

    def end(self) -> None:
        """End the server."""
        super().close()


def shared_server(model: Path, directory: Path, **changes: object) -> SharedServer:
    """Return a server for a policy directory; it starts with its first engine."""
    return SharedServer(ServerSettings(vllm_python(), model, directory, sequences=64, **changes))  # type: ignore[arg-type]
