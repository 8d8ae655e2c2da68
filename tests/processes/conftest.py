"""What the programs under test find on a machine that has run them before, and what none of their processes may do."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.measuring.patch_kernels import compile_patch_kernels
from tests.support.processes import programs
from tests.support.processes.network_of_processes import RULES, NetworkOfProcesses

_HOOK: Final = """
import multiprocessing, sys

def note(event, arguments):
    if event == "import" and "trio" in sys.modules and multiprocessing.parent_process() is not None:
        try:
            task = sys.modules["trio"].lowlevel.current_task()
        except (AttributeError, RuntimeError):
            return  # no task: a thread, or a process before its event loop
        with open({file!r}, "a") as file:
            print(multiprocessing.current_process().name, task.name, "imports", arguments[0], file=file)

sys.addaudithook(note)
"""


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    """Compile the patch kernels once, and cache them: else the first versions of a short run come too late to be looked
    at.
    """
    compile_patch_kernels()


@pytest.fixture
def network(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NetworkOfProcesses]:
    """Return a network with the rules of the test's module, if it has some of its own."""
    network = NetworkOfProcesses(tmp_path / "network", getattr(request.module, "NETWORK_RULES", RULES))
    yield network
    network.end()


@pytest.fixture(autouse=True)
def imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail where a task of a node's process imports a module: that takes up to half a second, in which its event loop
    stands still. Whether it does depends on no machine, unlike the seconds.
    """
    file, folder = tmp_path / "imports-of-tasks", tmp_path / "hook"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_HOOK.format(file=str(file)))
    paths = (str(folder), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setitem(programs.ENVIRONMENT, "PYTHONPATH", os.pathsep.join(filter(None, paths)))
    yield
    assert not file.exists(), file.read_text()
