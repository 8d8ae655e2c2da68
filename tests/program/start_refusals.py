"""What a node does whose run has no place for vLLM or for sites."""

from pathlib import Path

import pytest

from grailnode.config import ConfigError
from grailnode.node.role_processes import check_start
from grailnode.run import key_files
from grailnode.run.joining import open_config
from protocol.identity.signing import SigningKey
from tests.support.processes.command_line import run_command


def check_canary_is_refused(run: Path) -> None:
    """Check that a trainer whose canaries would use vLLM does not start.

    Args:
        run: its run.toml.
    """
    settings = ("trainer.canaries=1", "engine.kind='vllm'", "engine.url='http://127.0.0.1:1'")
    with pytest.raises(ConfigError, match='"vllm" cannot serve this run'):
        check_start(open_config(str(run), settings), "trainer", "trainer", print)


def check_site_is_refused(run: Path, message: str) -> None:
    """Check that a site does not start, and that no key becomes that of a site.

    Args:
        run: its run.toml.
        message: a part of both errors.
    """
    key_files.create(run.parent / "keys" / "worker-1.key")
    with pytest.raises(ConfigError, match=message):
        check_start(open_config(str(run)), "worker", "worker-1", print)
    key = SigningKey(bytes([77]) * 32).public.hex()
    command = run_command("keys", "grant", key, "--role", "worker", "--run", str(run))
    assert command.returncode == 1
    assert message in command.stderr
