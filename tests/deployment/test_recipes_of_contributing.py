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


def recipe(kind: str) -> str:
    """Return the section of the page that says how to add something of this kind."""
    (section,) = re.findall(rf"^## Add an? {kind}\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    return str(section)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what recipes change and run. Python and numba compile it once for all of them."""
    directory = tmp_path_factory.mktemp("repository")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, directory / name)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_commands_of_a_recipe_add_a_copy_that_passes_its_contract(kind: str, repository: Path) -> None:
    (commands,) = re.findall(r"^```\n(.*?)^```$", recipe(kind), re.MULTILINE | re.DOTALL)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(repository),
        "PYTEST_ADDOPTS": "-n 0 -p no:cacheprovider",
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
