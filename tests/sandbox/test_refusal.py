"""Where there is no sound sandbox, the program says so and runs nothing. These need no bubblewrap."""

import sys
from pathlib import Path

import pytest

from grailnode.sandbox import BubblewrapSandbox, seccomp
from protocol.environments.base import SandboxError
from tests.sandbox.conftest import OWN

FAILING = "#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n"
WALL_LESS = '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n'

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes are for Linux")


def put(directory: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bwrap of our own, and no other; the shell goes on working."""
    path = directory / "bwrap"
    path.write_text(program)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory))


def test_no_bubblewrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="no bwrap on the PATH: install bubblewrap"):
        BubblewrapSandbox.open(OWN)


def test_no_name_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, FAILING, monkeypatch)
    with pytest.raises(SandboxError, match=r"uid map: Permission denied.*user name spaces must be allowed"):
        BubblewrapSandbox.open(OWN)


def test_walls_with_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, WALL_LESS, monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    with pytest.raises(SandboxError, match=r"holes here: .*sockets.*environment"):
        BubblewrapSandbox.open(OWN)


def test_no_such_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, FAILING, monkeypatch)
    with pytest.raises(SandboxError, match=r"for Python 3\.7, and there is no python3\.7"):
        BubblewrapSandbox.open("3.7")


def test_no_filter_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "vax")
    with pytest.raises(SandboxError, match="needs Linux on x86_64 or aarch64"):
        BubblewrapSandbox.open(OWN)


@pytest.mark.parametrize("machine", seccomp.machines)
def test_every_jump_of_the_filter_lands(machine: str) -> None:
    """The last two instructions allow and refuse; each comparison goes on to the next one or lands on the refusal."""
    program = seccomp.refusals(machine)
    count = len(program) // 8
    for place in range(5, count - 2):
        assert place + 1 + program[8 * place + 2] == count - 1
        assert program[8 * place + 3] == 0
    assert 4 + 1 + program[8 * 4 + 2] == count - 1
    assert count < 256
