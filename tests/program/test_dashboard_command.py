"""`grailnode dashboard` as a process: it says where the page is, serves it, and ends with Ctrl-C."""

import socket
import time
from pathlib import Path

import httpx
import pytest

from tests.support.processes.command_line import fail, succeed
from tests.support.processes.programs import PATIENCE, Program


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("run")
    succeed("init", str(directory))
    return str(directory / "run.toml")


def test_a_port_in_use_is_reported_in_one_line(run_file: str):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        error = fail("dashboard", "--run", run_file, "--port", str(port))
    assert f"--host 127.0.0.1 --port {port}: cannot be used" in error


def test_it_serves_a_run_that_has_not_begun_and_warns_who_can_see_it(run_file: str, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    program = Program(
        "dashboard", "--run", run_file, "--host", "0.0.0.0", "--port", str(port), log=tmp_path / "dashboard.log"
    )
    try:
        deadline = time.monotonic() + PATIENCE
        while "http://" not in (log := program.log.read_text()):
            assert program.process.poll() is None, log
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert log.startswith(f"0.0.0.0: whoever reaches port {port} of this machine sees the page\n")
        while "No window was judged yet." not in (page := httpx.get(f"http://127.0.0.1:{port}/").text):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert "The run has published no version that could be read." in page
        program.interrupt()
        assert program.wait() == 130
    finally:
        program.kill()
