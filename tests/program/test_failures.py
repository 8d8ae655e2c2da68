"""What a process that fails says, and whether its supervisor starts it again."""

import errno
import io
import os
from pathlib import Path

import pytest

from grailnode.node.telemetry import NodeTelemetry
from grailnode.node.user_errors import explain, passing
from protocol.errors import MalformedError
from roles.ports import StoreError


def os_error(code: int) -> OSError:
    return OSError(code, os.strerror(code), "state/lock")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EMFILE])
def test_what_a_machine_has_too_little_of_may_come_back(code: int) -> None:
    assert passing(os_error(code))
    assert passing(ExceptionGroup("nursery", [os_error(code), StoreError("down")]))
    assert (explain(os_error(code)) or "").startswith("state/lock: ")


@pytest.mark.parametrize("error", [os_error(errno.ENOENT), os_error(errno.EACCES), MalformedError("bent"), KeyError()])
def test_what_starting_again_does_not_mend(error: Exception) -> None:
    assert not passing(error)
    assert not passing(ExceptionGroup("nursery", [error, StoreError("down")]))


def test_a_log_that_cannot_be_written_is_told_and_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    terminal = io.StringIO()
    telemetry = NodeTelemetry.to_file("miner", tmp_path / "logs" / "miner.jsonl", terminal)
    telemetry.event("started")
    first, second = terminal.getvalue().splitlines()
    assert "log-unwritable" in first and str(tmp_path) in first
    assert "started" in second
