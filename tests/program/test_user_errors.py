"""What a failing process prints, and whether its supervisor starts it again."""

import errno
import io
import os
from pathlib import Path

import pytest

from grailnode.calibration.proof_file import ProofFileError
from grailnode.calibration.thresholds import CalibrationError
from grailnode.config import ConfigError
from grailnode.convert.conversion import ConversionError
from grailnode.engine.policy import PolicyError
from grailnode.node.supervisor import ProcessError
from grailnode.node.telemetry import NodeTelemetry
from grailnode.node.user_errors import StateInUseError, explain, is_transient
from grailnode.run.authority_drafts import RevisionError
from grailnode.run.buckets import BucketError
from grailnode.run.key_files import KeyFileError
from grailnode.run.requirements import RequirementError
from grailnode.run.workspace import WorkspaceError
from grailnode.store.credentials import CredentialsError
from protocol.environments.base import SandboxError
from protocol.errors import MalformedError, ProtocolError
from roles.ports import StoreError
from roles.trainer.publish.fencing import FencedError


def os_error(code: int) -> OSError:
    return OSError(code, os.strerror(code), "state/lock")


ERRORS = [
    BucketError,
    CalibrationError,
    ProofFileError,
    ConversionError,
    CredentialsError,
    FencedError,
    StateInUseError,
    ConfigError,
    KeyFileError,
    PolicyError,
    ProcessError,
    RequirementError,
    RevisionError,
    SandboxError,
    WorkspaceError,
    ProtocolError,
    StoreError,
]


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_that_the_operator_can_repair_is_one_line(kind: type[Exception]) -> None:
    assert explain(kind("run.toml: broken")) == "run.toml: broken"
    assert explain(ExceptionGroup("nursery", [kind("run.toml: broken")])) == "run.toml: broken"


@pytest.mark.parametrize("error", [KeyError("a"), ValueError("a"), AssertionError(), OSError()])
def test_a_fault_of_the_program_is_not_explained(error: Exception) -> None:
    assert explain(error) is None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EMFILE])
def test_a_shortage_of_the_machine_is_transient(code: int) -> None:
    assert is_transient(os_error(code))
    assert is_transient(ExceptionGroup("nursery", [os_error(code), StoreError("down")]))
    assert (explain(os_error(code)) or "").startswith("state/lock: ")


@pytest.mark.parametrize("error", [os_error(errno.ENOENT), os_error(errno.EACCES), MalformedError("bent"), KeyError()])
def test_other_failures_are_not_transient(error: Exception) -> None:
    assert not is_transient(error)
    assert not is_transient(ExceptionGroup("nursery", [error, StoreError("down")]))


def test_a_log_that_cannot_be_written_is_reported_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    terminal = io.StringIO()
    telemetry = NodeTelemetry.to_file("miner", tmp_path / "logs" / "miner.jsonl", terminal)
    telemetry.event("started")
    first, second = terminal.getvalue().splitlines()
    assert "log-unwritable" in first and str(tmp_path) in first
    assert "started" in second
