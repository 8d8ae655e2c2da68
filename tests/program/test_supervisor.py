"""The supervisor of a node's processes, what a failing process prints, and whether it is started again."""

import errno
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import trio

from grailnode import UserError
from grailnode.config import load
from grailnode.engine import models
from grailnode.engine.policy import Policy
from grailnode.node.bodies import fetch_task
from grailnode.node.early_fork import start_fork_server
from grailnode.node.supervisor import EXIT_PERMANENT, EXIT_TRANSIENT, ProcessSpec, Supervisor, next_delay
from grailnode.node.telemetry import NodeTelemetry
from grailnode.node.user_errors import explain, is_transient
from grailnode.node.wiring import make_task
from grailnode.run import creation
from protocol.errors import MalformedError
from roles.ports import BeaconError, StoreError
from tests.support.processes.programs import ENVIRONMENT, exit_with
from tests.support.simulation.network import Network
from tests.support.simulation.network_runs import RULES


async def keep(counter: Path, codes: list[int]) -> list[str]:
    """Keep a process that ends with these codes, and return what the supervisor reports until it gives up."""
    lines: list[str] = []
    with pytest.raises(UserError, match=r"^worker "):
        await Supervisor(lines.append).keep([ProcessSpec("worker", exit_with, (counter, codes))])
    return lines


@pytest.fixture
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grailnode.node.supervisor.next_delay", lambda delay, uptime: 0.0)


@pytest.mark.usefixtures("no_delays")
def test_a_node_goes_on_however_often_storage_ends_its_process(tmp_path: Path) -> None:
    lines = trio.run(keep, tmp_path / "starts", [EXIT_TRANSIENT] * 8 + [EXIT_PERMANENT])
    assert len(lines) == 8
    assert "storage or this machine failed" in lines[0]
    # a process that is started for ever says how often, and why the last time
    assert [line.partition("(start ")[2].partition(" since ")[0] for line in lines] == [str(n) for n in range(2, 10)]


@pytest.mark.usefixtures("no_delays")
def test_a_node_gives_up_on_a_program_that_fails_six_times_within_a_minute(tmp_path: Path) -> None:
    codes = [1, EXIT_TRANSIENT, 1, 1, 1, 1, 1]
    assert len(trio.run(keep, tmp_path / "starts", codes)) == 6
    assert (tmp_path / "starts").stat().st_size == 7


COPIED = """
import sys, trio, types
from grailnode.node.early_fork import start_fork_server
from grailnode.node.supervisor import ProcessSpec, Supervisor

copied = sys.modules["copied"] = types.ModuleType("copied")  # no interpreter could import it
exec("def run(): import signal; print(signal.getsignal(signal.SIGINT), flush=True); raise SystemExit(3)", vars(copied))
start_fork_server()
trio.run(Supervisor(print).keep, [ProcessSpec("worker", copied.run, ())])
"""


def test_processes_of_a_program_are_copies_of_it_that_leave_ctrl_c_to_it() -> None:
    command = (sys.executable, "-c", COPIED)
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert result.stdout == "1\n", result.stderr  # SIG_IGN
    assert "worker cannot go on" in result.stderr


def test_a_program_with_threads_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", None)
    done = threading.Event()
    with ThreadPoolExecutor(1) as other:
        other.submit(done.wait)
        start_fork_server()
        done.set()


def test_the_delay_grows_to_half_a_minute_and_begins_anew_after_a_minute_of_work() -> None:
    delay, delays = 0.0, []
    for _ in range(20):
        delay = next_delay(delay, 1.0)
        delays.append(delay)
    assert delays == sorted(delays)
    assert delays[0] < 1 < delays[6] < 5
    assert delays[-1] == 30.0
    assert next_delay(30.0, 61.0) == delays[0]


# What a failing process prints, and whether its supervisor starts it again


def os_error(code: int) -> OSError:
    return OSError(code, os.strerror(code), "state/lock")


@pytest.mark.parametrize(
    "name",
    [
        "grailnode.UserError",
        "grailnode.calibration.proof_file.ProofFileError",
        "grailnode.engine.policy.PolicyError",
        "grailnode.node.user_errors.StateInUseError",
        "protocol.environments.base.SandboxError",
        "protocol.errors.ProtocolError",
        "roles.ports.BeaconError",
        "roles.ports.FencedError",
        "roles.ports.StoreError",
    ],
)
def test_an_error_that_the_operator_can_repair_is_one_line(name: str) -> None:
    kind: type[Exception] = resolve_name(name)
    assert explain(kind("run.toml: broken")) == "run.toml: broken"
    assert explain(ExceptionGroup("nursery", [kind("run.toml: broken")])) == "run.toml: broken"


@pytest.mark.parametrize("error", [KeyError("a"), ValueError("a"), AssertionError(), OSError()])
def test_a_fault_of_the_program_is_not_explained(error: Exception) -> None:
    assert explain(error) is None


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        *((os_error(code), True) for code in (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EMFILE)),
        *((os_error(code), False) for code in (errno.ENOENT, errno.EACCES)),
        (MalformedError("bent"), False),
        (KeyError(), False),
    ],
)
def test_a_shortage_of_the_machine_is_transient_and_other_failures_are_not(error: Exception, transient: bool) -> None:
    assert is_transient(error) == transient
    assert is_transient(ExceptionGroup("nursery", [error, StoreError("down"), BeaconError("late")])) == transient
    assert not transient or (explain(error) or "").startswith("state/lock: ")


def test_a_log_that_cannot_be_written_is_reported_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    terminal = io.StringIO()
    telemetry = NodeTelemetry("miner", tmp_path / "logs" / "miner.jsonl", terminal)
    telemetry.event("started")
    first, second = terminal.getvalue().splitlines()
    assert "log-unwritable" in first and str(tmp_path) in first
    assert "started" in second


# What a miner or validator loads at its start is loaded beside the event loop, where it delays nobody else


async def test_policy_model_and_task_are_loaded_in_other_threads(
    run_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, int] = {}

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            threads[name] = threading.get_ident()
            return function(*arguments, **options)

        return call

    network = Network(RULES)
    node = replace(network.node("miner-1"), run_sync=trio.to_thread.run_sync)
    files = creation.model_files(network.policy.directory)
    await creation.publish_files(network.store, node.authority.trainers[0], files)
    monkeypatch.setattr(Policy, "load", watched("policy", Policy.load))
    monkeypatch.setattr(models, "build", watched("model", models.build))
    monkeypatch.setattr("grailnode.node.wiring.make_task", watched("task", make_task))
    task, _ = await fetch_task(node, load(run_toml), tmp_path / "state")
    assert task.run == node.run
    assert threads.keys() == {"policy", "model", "task"}
    assert threading.get_ident() not in threads.values()
