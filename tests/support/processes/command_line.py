"""Runs `grailnode` commands inside the test's own process, for tests to which the process is not the point."""

import contextlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from grailnode.cli.main import main


@dataclass(frozen=True)
class CommandResult:
    """What a finished command returned and printed."""

    returncode: int
    stdout: str
    stderr: str


def run_command(*arguments: str, cwd: Path | None = None) -> CommandResult:
    """Run a command through the console script's own function, and return its exit code and output.

    An error that the program does not turn into a line for its user is raised here, where a process would print a
    traceback.

    Args:
        cwd: working directory of the command; the current one without it.
    """
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["grailnode", *arguments]),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
        contextlib.chdir(cwd or Path.cwd()),
    ):
        returncode = _exit_code()
    return CommandResult(returncode, stdout.getvalue(), stderr.getvalue())


def succeed(*arguments: str, cwd: Path | None = None) -> str:
    """Run a command that must succeed, and return its output."""
    result = run_command(*arguments, cwd=cwd)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def fail(*arguments: str, code: int = 1, cwd: Path | None = None) -> str:
    """Run a command that must end with an exit code, and return its error: one line, or the usage and a line."""
    result = run_command(*arguments, cwd=cwd)
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert code == 2 or len(result.stderr.splitlines()) == 1
    return result.stderr


def _exit_code() -> int:
    try:
        main()
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    return 0
