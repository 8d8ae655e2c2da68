"""Plug-ins for tests: built as wheels by pip without an index, and installed in a folder."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.support.processes.programs import ROOT

PAGE: Final = ROOT / "docs" / "guide" / "own-task.md"
_PROJECT: Final = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "{name}"
version = "1.0"
dependencies = {requires}
[project.entry-points."grailnode.environments"]
{name} = "{module}:Task"
[tool.setuptools]
py-modules = ["{module}"]
"""


def files_of_page() -> dict[str, str]:
    """Return the files of the plug-in that the guide shows, by name."""
    blocks = re.findall(r"^```\n# ([\w.]+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return dict(blocks)


def files_of(name: str, source: str, requires: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the files of a plug-in whose class is called Task."""
    module = name.replace("-", "_")
    project = _PROJECT.format(name=name, module=module, requires=list(requires))
    return {"pyproject.toml": project, f"{module}.py": source}


def install(files: dict[str, str], directory: Path) -> Path:
    """Build a wheel of these files, install it in a folder of its own, and return the folder."""
    source, site = directory / "source", directory / "site"
    source.mkdir(parents=True)
    for name, text in files.items():
        (source / name).write_text(text)
    pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
    options = ("--no-index", "--no-deps")
    wheel = (*pip, "wheel", "--no-build-isolation", *options, "-w", str(directory / "dist"), str(source))
    subprocess.run(wheel, check=True, capture_output=True, text=True)
    (built,) = (directory / "dist").glob("*.whl")
    subprocess.run((*pip, "install", *options, "--target", str(site), str(built)), check=True, capture_output=True)
    return site
