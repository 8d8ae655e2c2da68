"""`grailnode dashboard` as a process: it says where the page is, serves it, and ends with Ctrl-C."""

import json
import socket
import time
from pathlib import Path

import httpx
import pytest

from grailnode.cli.actions.run_dashboard import _for_host
from grailnode.node.http_server import Answer, Request
from tests.support.processes.command_line import fail, succeed
from tests.support.processes.programs import Program, eventually


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("run")
    succeed("init", str(directory))
    wait = {"time": time.time(), "event": "beacon-late", "waits_for": "beacon", "error": "none", "until": "it answers"}
    (directory / "logs").mkdir()
    (directory / "logs" / "miner-1.jsonl").write_text(f"{json.dumps(wait)}\n")
    return str(directory / "run.toml")


def test_a_port_in_use_is_reported_in_one_line(run_file: str):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        error = fail("dashboard", "--run", run_file, "--port", str(port))
    assert f"--host 127.0.0.1 --port {port}: cannot be used" in error


@pytest.mark.parametrize("options", [("--host", "0.0.0.0"), ("--local",)])
def test_it_serves_a_run_that_has_not_begun_and_warns_who_can_see_it(
    options: tuple[str, ...], run_file: str, tmp_path: Path
):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    program = Program("dashboard", "--run", run_file, *options, "--port", str(port), log=tmp_path / "log")
    address, is_public = f"http://127.0.0.1:{port}/", "0.0.0.0" in options
    try:
        eventually(lambda: "http://" in program.log.read_text(), "it says where the page is")
        warning = f"0.0.0.0: whoever reaches port {port} of this machine sees the page\n"
        assert program.log.read_text().startswith(warning) == is_public
        eventually(lambda: "No window was judged yet." in httpx.get(address).text, "it has read the run")
        page = httpx.get(address).text
        assert "The run has published no version that could be read." in page
        # a proxy of this machine may ask for others, as if it were the machine's owner
        assert ("miner-1 waits for beacon since" in page) == ("--local" in options)
        answer = httpx.get(address, headers={"Host": "any.example"})
        assert (answer.status_code == 200) == is_public
        program.interrupt()
        assert program.wait() == 130
    finally:
        program.kill()


@pytest.mark.parametrize(
    ("host", "name", "is_answered"),
    [
        *[("127.0.0.1", name, True) for name in ("127.0.0.1:8600", "localhost:8600", "LOCALHOST", "[::1]:8600")],
        *[("127.0.0.1", name, False) for name in ("evil.example:8600", "", "127.0.0.1.evil.example", "[", "[::1")],
        ("localhost", "localhost:1", True),
        ("0.0.0.0", "north.example.org", True),
    ],
)
def test_on_loopback_only_requests_to_this_machine_are_answered(host: str, name: str, is_answered: bool):
    answer = _for_host(host, lambda _: Answer(b"page"))(Request("/", "", {"host": name}))
    assert (answer.body == b"page") == is_answered
