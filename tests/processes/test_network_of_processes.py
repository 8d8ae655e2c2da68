"""The network as real processes over a real directory, killed with kill -9 in mid-window."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.processes.command_line import run_command
from tests.support.processes.network_of_processes import NetworkOfProcesses, wait_until_gone
from tests.support.processes.programs import Program, eventually, members


@pytest.fixture
def network(tmp_path: Path) -> Iterator[NetworkOfProcesses]:
    network = NetworkOfProcesses(tmp_path)
    yield network
    for program in network.programs.values():
        program.end()


@pytest.mark.slow
def test_every_role_survives_kill_9_and_the_chain_stays_whole(network: NetworkOfProcesses):
    roles = {"trainer": "trainer", "validator": "validator", "miner-1": "miner", "miner-2": "miner"}
    for name, role in roles.items():
        network.start(role, name)
    eventually(lambda: network.newest_version() >= 2, "the first versions")

    for name in ("miner-1", "validator", "trainer"):
        victim = network.programs[name]
        victim.kill()
        wait_until_gone(victim)
        progress = network.progress()
        network.start(roles[name], name)
        eventually(partial(network.is_beyond, progress), f"new versions and verdicts after {name} came back")

    training = members(network.programs["trainer"].session)[-1]  # the newest process: one that the supervisor started
    progress = network.progress()
    os.kill(training, signal.SIGKILL)
    eventually(partial(network.is_beyond, progress), "progress after a process of the trainer was killed")

    for program in network.programs.values():
        program.interrupt()
    for program in network.programs.values():
        program.wait()
        wait_until_gone(program)

    verify_result = run_command("verify", "--run", str(network.workspace.config))
    assert verify_result.returncode == 0, verify_result.stdout + verify_result.stderr
    newest = network.newest_version()
    # Ctrl-C may come when storage has a head that the trainer has no answer about yet
    assert any(f"version {version} holds" in verify_result.stdout for version in (newest, newest + 1))
    versions = [event["version"] for event in network.events("trainer-upload", "published")]
    assert versions == sorted(versions)
    assert set(versions) == set(range(versions[-1] + 1))
    verdicts = network.events("validator", "verdict")
    assert verdicts
    assert all(verdict["rejected"] == 0 for verdict in verdicts)
    digests: dict[int, set[str]] = {}
    for name in ("miner-1", "miner-2", "validator"):
        for event in network.events(name, "serving"):
            digests.setdefault(event["version"], set()).add(event["weights"])
    assert all(len(events) == 1 for events in digests.values())

    for patch in (network.workspace.directory / "store").glob("*/patches/*"):
        data = patch.read_bytes()
        patch.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    error_info = run_command("verify", "--run", str(network.workspace.config))
    assert error_info.returncode == 1
    assert "not the bytes that the manifest names" in error_info.stderr
    assert len(error_info.stderr.splitlines()) == 1

    status_result = run_command("status", "--run", str(network.workspace.config))
    assert status_result.returncode == 0, status_result.stderr
    assert "miner-1" in status_result.stdout


def test_a_terminal_that_takes_nothing_stops_no_node(network: NetworkOfProcesses):
    terminal = Path("/dev/full")
    trainer = Program("--role", "trainer", "--run", str(network.workspace.config), log=terminal)
    network.programs["trainer"] = trainer
    eventually(lambda: network.newest_version() >= 0, "the first version")
    before = members(trainer.session)
    os.kill(before[-1], signal.SIGKILL)
    eventually(lambda: bool(set(members(trainer.session)) - set(before)), "a process in the place of the killed one")
    assert trainer.process.poll() is None
    trainer.interrupt()
    assert trainer.wait() == 0
    wait_until_gone(trainer)
