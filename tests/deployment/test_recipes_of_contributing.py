"""The recipes of CONTRIBUTING.md, carried out word for word in a copy of the repository."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
KINDS = ("environment", "store", "engine", "adversary")
COPIED = ("protocol", "roles", "grailnode", "tests", "pyproject.toml")
UNFINISHED = shutil.ignore_patterns("*.pyc.*", "*.tmp.*")
"""Files in caches that other processes may be writing now, as Python and numba name them."""
LONG_TESTS = (
    "tests/engine/test_my_model.py::TestMyModel::test_a_check_agrees_with_the_torch_engine",
    "tests/environments/test_registry.py::test_the_reward_of_any_text_is_between_zero_and_one",
)
"""Tests of a recipe that take half of its time, and show nothing else of the recipe; the originals pass them, too."""
INSTALLING = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
"""Lets pip install without an index, and (a double negation) with the tools of this environment."""


def recipe(kind: str) -> str:
    """Return the section of the page that says how to add something of this kind."""
    (section,) = re.findall(rf"^## Add an? {kind}\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    return str(section)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a copy of what a recipe changes and runs, with compiled kernels, whose times of change are the files'."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=UNFINISHED)
        else:
            shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_the_commands_of_a_recipe_add_a_copy_that_passes_its_contract(kind: str, repository: Path) -> None:
    (commands,) = re.findall(r"^```\n(.*?)^```$", recipe(kind), re.MULTILINE | re.DOTALL)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{repository}{os.pathsep}{repository / 'installed'}",
        **INSTALLING,
        "PIP_TARGET": str(repository / "installed"),
        "PYTEST_ADDOPTS": " ".join(["-n 0 -p no:cacheprovider", *(f"--deselect {test}" for test in LONG_TESTS)]),
    }
    script = ["bash", "-euo", "pipefail", "-c", commands]
    result = subprocess.run(script, cwd=repository, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"\b[1-9]\d* passed", result.stdout), result.stdout


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "adversary"])
def test_a_recipe_names_all_members_of_its_interface(kind: str) -> None:
    ((name, path, members),) = re.findall(r"implements `(\w+)` of `([\w/]+)\.py`: ((?:`\w+`,?\s*)+)\.", recipe(kind))
    interface = getattr(importlib.import_module(path.replace("/", ".")), name)
    assert set(re.findall(r"\w+", members)) == {member for member in vars(interface) if not member.startswith("_")}
