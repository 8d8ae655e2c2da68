"""Plug-ins for tests, installed in a folder: by pip without an index, or as pip would."""

import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Final

from tests.support.processes.programs import ROOT

PAGES: Final = [ROOT / "docs" / "guide" / name for name in ("own-task.md", "own-episode.md")]


def files_of_page() -> dict[str, str]:
    """Return the files of the plug-in that the guide shows, by name."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    return dict(re.findall(r"^```\n# ([\w.]+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def install(files: dict[str, str], directory: Path) -> Path:
    """Install the wheel that pip builds of these files in a folder of its own, and return the folder."""
    return Path(shutil.copytree(Path(_installed(frozenset(files.items())).name) / "site", directory / "site"))


def install_example(name: str, directory: Path) -> Path:
    """Install a plug-in of examples/, as `install` does."""
    folder = ROOT / "examples" / name
    return install({file.name: file.read_text() for file in folder.iterdir() if file.is_file()}, directory)


def example(name: str) -> ModuleType:
    """Return the module of a plug-in of examples/, which need not be installed."""
    (file,) = (ROOT / "examples" / name).glob("*.py")
    module = ModuleType(file.stem)
    exec(file.read_text(), module.__dict__)
    return module


@cache
def _installed(files: frozenset[tuple[str, str]]) -> TemporaryDirectory[str]:
    """Return a directory in whose folder `site` pip has installed these files: once, since it takes seconds."""
    temporary = TemporaryDirectory()
    directory = Path(temporary.name)
    source = directory / "source"
    source.mkdir()
    for name, text in files:
        (source / name).write_text(text)
    pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
    options = ("--no-index", "--no-deps")
    wheel = (*pip, "wheel", "--no-build-isolation", *options, "-w", str(directory / "dist"), str(source))
    subprocess.run(wheel, check=True, capture_output=True, text=True)
    (built,) = (directory / "dist").glob("*.whl")
    site = ("--target", str(directory / "site"))
    subprocess.run((*pip, "install", *options, *site, str(built)), check=True, capture_output=True)
    return temporary


def install_module(name: str, source: str, directory: Path, requires: tuple[str, ...] = ()) -> Path:
    """Write what pip would install of a plug-in of one module, whose class is called Task, and return the folder."""
    module = name.replace("-", "_")
    site = install_metadata(name, f"[grailnode.environments]\n{name} = {module}:Task\n", directory, requires)
    (site / f"{module}.py").write_text(source)
    return site


def install_metadata(name: str, entry_points: str, directory: Path, requires: tuple[str, ...] = ()) -> Path:
    """Write what describes an installed distribution of one module, and return the folder."""
    module, site = name.replace("-", "_"), directory / "site"
    folder = site / f"{module}-1.0.dist-info"
    folder.mkdir(parents=True)
    metadata = (
        "Metadata-Version: 2.1",
        f"Name: {name}",
        "Version: 1.0",
        *(f"Requires-Dist: {one}" for one in requires),
    )
    (folder / "METADATA").write_text("\n".join((*metadata, "")))
    (folder / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    (folder / "entry_points.txt").write_text(entry_points)
    files = [f"{module}.py", *(f"{folder.name}/{file.name}" for file in sorted(folder.iterdir()))]
    (folder / "RECORD").write_text("".join(f"{path},,\n" for path in files))
    return site
