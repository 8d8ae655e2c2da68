"""A trainer whose ranks are on two hosts, which are network namespaces: one is killed, and their link is cut."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from tests.support.processes.programs import Program, eventually, logged_events, members
from tests.support.processes.stepwise_trainer import StepwiseTrainer, make_run

VERSIONS = 3
ADDRESS = "10.213.0.1"
HOSTS = """[trainer]
hosts = {{ count = 2, number = {}, meeting = "{}:29500" }}
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def within(namespace: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", namespace)


@contextmanager
def two_namespaces() -> Iterator[tuple[str, str]]:
    """Two namespaces with a link between them: `up` in the first, with ADDRESS, and `down` in the second."""
    names = f"grailnode-a-{os.getpid()}", f"grailnode-b-{os.getpid()}"
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "up", "netns", names[0], "type", "veth", "peer", "name", "down", "netns", names[1])
        for name, interface, address in zip(names, ("up", "down"), (ADDRESS, "10.213.0.2"), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", interface)
            ip("-n", name, "link", "set", interface, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and ip")
    with two_namespaces() as names:
        yield names


@pytest.mark.slow
def test_hosts_of_which_one_is_killed_and_one_is_cut_off_publish_what_one_host_does(
    tmp_path: Path, namespaces: tuple[str, str]
) -> None:
    """A step has one pass, so that the second rank adds nothing to the gradients but its rows of the masters."""
    alone = make_run(tmp_path / "alone")
    hosts = [tmp_path / "a", tmp_path / "b"]
    for number, host in enumerate(hosts):
        shutil.copytree(alone, host)
        settings = host / "run.toml"
        settings.write_text(settings.read_text().replace("[trainer]\n", HOSTS.format(number, ADDRESS)))
    shutil.rmtree(hosts[1] / "keys")
    weights = StepwiseTrainer(alone).publish_versions(VERSIONS)
    others: list[Program] = []

    def start_other() -> None:
        run = ("--role", "trainer", "--run", str(hosts[1] / "run.toml"))
        others.append(Program(*run, log=tmp_path / "b.terminal", within=within(namespaces[1])))

    def failures() -> list[int]:
        logs = hosts[0] / "logs" / "trainer-training.jsonl", hosts[1] / "logs" / "trainer-training-1.jsonl"
        events = [logged_events(log, "failed") for log in logs]
        return [sum("no answer" in event["error"] for event in found) for found in events]

    def join_again() -> None:
        eventually(lambda: min(failures()) > 0, "both hosts notice that the link is cut")
        ip("-n", namespaces[0], "link", "set", "up", "up")

    def harm(version: int) -> None:
        if version == 1:
            others[-1].end()
            eventually(lambda: not members(others[-1].session), "the killed host")
            start_other()
        if version == 2:
            ip("-n", namespaces[0], "link", "set", "up", "down")
            Thread(target=join_again, daemon=True).start()

    start_other()
    try:
        trainer = StepwiseTrainer(hosts[0], within=within(namespaces[0]))
        assert trainer.publish_versions(VERSIONS, when_published=harm) == weights
        assert min(failures()) > 0
        parts = [{path.parent.name for path in host.glob("**/checkpoints/*/*/*")} for host in hosts]
        assert parts == [{"00000"}, {"00001"}]
    finally:
        others[-1].end()
