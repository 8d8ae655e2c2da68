"""The vLLM engine survives its processes: killed, stopped, and left alone, with the real vLLM."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio

from grailnode.engine.policy import Policy
from grailnode.engine.vllm.server_launcher import ServerLauncher
from grailnode.engine.vllm.vllm_engine import VllmEngine
from grailnode.engine.vllm.vllm_server import ChildServer
from grailnode.engine.vllm.vllm_settings import EngineLimits, VllmSettings
from protocol.rollout.sampling import SamplingParams
from roles.policy.causal_model import CausalModel
from tests.engine.engine_contract import changed, check_tokens, serve
from tests.engine.vllm_site import ForkedServer, new_launcher, vllm_python
from tests.support.builders.policies import engine_of, random_weights, requests_of_many_lengths

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LONG = SamplingParams(temperature=1.0, max_tokens=40, stops=(31,))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the working directory of all processes of vLLM."""
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def launcher(directory: Path) -> Iterator[ServerLauncher]:
    """Return the launcher of the tests' servers. A test that ends it gets a new one."""
    launcher = new_launcher(directory)
    yield launcher
    launcher.close()


@pytest.fixture
async def engine(
    policy: Policy, model: CausalModel, tmp_path: Path, launcher: ServerLauncher, directory: Path
) -> AsyncIterator[VllmEngine]:
    server = ForkedServer(VllmSettings(python=vllm_python()), policy.directory, tmp_path / "server", launcher)
    engine = VllmEngine(model, server, tmp_path / "engine", limits=EngineLimits(hang=5.0))
    yield engine
    await engine.close()
    await all_end(directory, but=launcher.process_id)


async def all_end(directory: Path, but: int | None = None) -> None:
    """Wait until no process of vLLM in a directory is left, but the one with an id."""
    with trio.fail_after(60):
        while set(processes_of(directory)) - {but}:
            await trio.sleep(0.1)


def processes_of(directory: Path) -> list[int]:
    """Return the ids of the processes of a server in a directory, in the order in which they were started: launcher,
    server, engine core, workers. Python's tracker of shared memory, which ends by itself, is left out.
    """
    result = []
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or (entry / "cwd").readlink() != directory:
                continue
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            is_tracker = b"resource_tracker" in (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if fields[0] != "Z" and not is_tracker:
            result.append((int(fields[19]), int(entry.name)))
    return [number for _, number in sorted(result)]


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("place", [0, 1, 2, 3], ids=["launcher", "server", "core", "worker"])
async def test_rollouts_survive_a_process(
    engine: VllmEngine, model: CausalModel, directory: Path, place: int, fault: signal.Signals
) -> None:
    weights = random_weights(model)
    target = changed(weights, 1)
    await serve(engine, weights, target)
    requests = requests_of_many_lengths(200)
    expected = await (await engine_of(model, target)).generate(requests, LONG)
    results = []

    async def generate() -> None:
        results.extend(await engine.generate(requests, LONG))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(generate)
        await trio.sleep(0.3)
        assert not results
        processes = processes_of(directory)
        assert len(processes) == 4
        os.kill(processes[place], fault)
    assert [g.tokens for g in results] == [g.tokens for g in expected]
    assert engine.version == 1
    await engine.verify()


async def test_what_killed_servers_leave_behind_is_removed(policy: Policy, model: CausalModel, tmp_path: Path) -> None:
    weights, memory, sockets = random_weights(model), Path("/dev/shm"), list[Path]()
    server = ChildServer(VllmSettings(python=vllm_python()), policy.directory, tmp_path / "a")
    engine = VllmEngine(model, server, tmp_path)
    await serve(engine, weights)
    for _ in range(2):
        await check_tokens(engine, model, weights)
        sockets.append(Path(server.socket))
        assert [*memory.glob(f"{sockets[-1].name}*")]
        assert [*sockets[-1].parent.glob("vllm_dist_*")]
        os.kill(processes_of(tmp_path / "a")[1], signal.SIGKILL)
    await engine.close()
    assert len(set(sockets)) == 2
    for socket in sockets:
        assert not [*memory.glob(f"{socket.name}*")]
        assert not socket.parent.exists()


async def test_a_launcher_that_was_stopped_is_replaced(engine: VllmEngine, model: CausalModel, directory: Path) -> None:
    weights = random_weights(model)
    await serve(engine, weights)
    launcher, server, *_ = processes_of(directory)
    os.kill(launcher, signal.SIGSTOP)
    os.kill(server, signal.SIGKILL)
    await check_tokens(engine, model, weights, LONG)
    assert processes_of(directory)[0] != launcher


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("grailnode.engine.vllm.vllm_server.ChildServer", signal.SIGKILL),
        ("bench.engines.speed.PlainVllm", signal.SIGTERM),
    ],
    ids=["node", "bench"],
)
async def test_no_process_outlives_its_starter(
    policy: Policy, tmp_path: Path, kind: str, fault: signal.Signals
) -> None:
    program = """
import sys, trio
from pathlib import Path
from pkgutil import resolve_name
from grailnode.engine.vllm.vllm_settings import VllmSettings
async def main():
    python, model, directory = map(Path, sys.argv[2:])
    await resolve_name(sys.argv[1])(VllmSettings(python=python), model, directory).start()
    print("ready", flush=True)
    await trio.sleep_forever()
trio.run(main)
"""
    directory = tmp_path / "server"
    arguments = [sys.executable, "-c", program, kind, str(vllm_python()), str(policy.directory), str(directory)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        assert await trio.to_thread.run_sync(starter.stdout.readline) == b"ready\n"
        assert len(processes_of(directory)) == 4
        starter.send_signal(fault)
    await all_end(directory)
