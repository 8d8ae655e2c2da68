"""The steps of the images, carried out in a clean Debian tree: without Docker, and with Debian's Python 3.11."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployment.commands import DOCKER, ROOT, instructions

PACKAGES = "ca-certificates,python3,python3-venv,python-is-python3"
"""What the base image has, by Debian's names."""
MOUNTED = ("/proc", "/dev", "/etc/resolv.conf", "/etc/ssl/certs", "/etc/xdg")
"""What a step sees of this machine: its kernel, its network, and what configures pip."""


def folders_of_pip() -> list[Path]:
    """Return the folders of this machine in which pip finds packages, of an index with the files beside it."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    settings = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    paths = [Path(path) for path in re.findall(r"(?:file://|')(/[^\s']+)", settings)]
    return [path.parent if path.name == "simple" else path for path in paths if path.is_dir()]


class Stage:
    """A stage of an image: its tree, its environment, and who carries out the next step where."""

    def __init__(self, root: Path) -> None:
        self.root, self.directory, self.user = root, "/", "root"
        self.variables = {"HOME": "/tmp", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}

    def carry_out(self, command: str) -> str:
        mounts = []
        for path in (*filter(Path.exists, map(Path, MOUNTED)), *folders_of_pip()):
            place = self.root / path.relative_to("/")
            (place if path.is_dir() else place.parent).mkdir(parents=True, exist_ok=True)
            if path.is_file():
                place.touch()
            mounts.append(f"mount --rbind {path} {place}")
        step = f"cd {self.directory} && {command}"
        chroot = shlex.join(["chroot", f"--userspec={self.user}", str(self.root), "/bin/sh", "-euc", step])
        result = subprocess.run(
            ["unshare", "--mount", "/bin/sh", "-euc", "\n".join((*mounts, f"exec {chroot}"))],
            env=os.environ | self.variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, f"{command}\n{result.stdout[-4000:]}{result.stderr[-4000:]}"
        return result.stdout

    def copy(self, arguments: list[str], stages: dict[str, "Stage"]) -> None:
        """Copy files from the repository or another stage; a folder's content into a folder, as Docker does."""
        options = dict(part[2:].split("=", 1) for part in arguments if part.startswith("--"))
        *sources, place = [part for part in arguments if not part.startswith("--")]
        origin = stages[options["from"]].root if "from" in options else ROOT
        target = self.root / place.lstrip("/") if place.startswith("/") else self.root / self.directory[1:] / place
        for source in (origin / part.lstrip("/") for part in sources):
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
                continue
            into = target / source.name if place.endswith("/") else target
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, into)
            into.chmod(int(options.get("chmod", "644"), 8))


def build(file: Path, base: Path, directory: Path) -> tuple[Stage, str]:
    """Carry out a Dockerfile's steps over a base tree; return the last stage, and what its container starts."""
    stages: dict[str, Stage] = {}
    words: dict[str, list[str]] = {}
    for verb, rest in instructions(file):
        if verb == "FROM":
            name = rest.partition(" AS ")[2] or "last"
            stage = stages[name] = Stage(directory / name)
            subprocess.run(["cp", "-a", base, stage.root], check=True)
        elif verb == "WORKDIR":
            stage.directory = rest
            (stage.root / rest[1:]).mkdir(parents=True, exist_ok=True)
        elif verb == "ENV":
            pairs = (word.replace("$PATH", stage.variables["PATH"]).split("=", 1) for word in shlex.split(rest))
            stage.variables |= dict(pairs)
        elif verb == "USER":
            stage.user = rest
        elif verb == "COPY":
            stage.copy(shlex.split(rest), stages)
        elif verb == "RUN":
            stage.carry_out(rest)
        elif verb in {"ENTRYPOINT", "CMD"}:
            words[verb] = shlex.split(rest.strip("[]").replace(",", " "))
    return stage, shlex.join(words["ENTRYPOINT"] + words["CMD"])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if shutil.which("mmdebstrap") is None or os.geteuid():
        pytest.skip("needs root and mmdebstrap (apt-get install mmdebstrap)")
    root = tmp_path_factory.mktemp("image") / "base"
    subprocess.run(["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", root], check=True)
    yield root
    shutil.rmtree(root.parent)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["Dockerfile", "Dockerfile.cuda"])
def test_the_steps_of_the_image_give_a_program_that_starts(base: Path, tmp_path: Path, file: str) -> None:
    if file == "Dockerfile.cuda" and "GRAILNODE_CUDA_IMAGE" not in os.environ:
        pytest.skip("the image for GPUs takes gigabytes of packages: set GRAILNODE_CUDA_IMAGE to build it, too")
    stage, command = build(DOCKER / file, base, tmp_path)
    assert "--role" in stage.carry_out(command)
    assert "ok   python" in stage.carry_out("grailnode doctor || true")
    shutil.rmtree(tmp_path)
