"""A trainer whose ranks are on two hosts, which are network namespaces: one is killed, and their link is cut."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from tests.support.processes.namespaces import NamespaceNetwork
from tests.support.processes.programs import Program, eventually, logged_events, members
from tests.support.processes.stepwise_trainer import StepwiseTrainer, make_run

VERSIONS = 3
HOSTS = """[trainer]
hosts = {{ count = 2, number = {}, meeting = "10.77.0.10:29500" }}
"""


@pytest.fixture
def network() -> Iterator[NamespaceNetwork]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and ip")
    with NamespaceNetwork.open(("a", "b")) as network:
        yield network


@pytest.mark.slow
def test_hosts_of_which_one_is_killed_and_one_is_cut_off_publish_what_one_host_does(
    tmp_path: Path, network: NamespaceNetwork
) -> None:
    """The one host has two ranks, because a step's passes are divided among ranks."""
    alone = make_run(tmp_path / "alone")
    settings = alone / "run.toml"
    settings.write_text(settings.read_text().replace("[trainer]\n", "[trainer]\nfile_bytes = 200_000\n"))
    hosts = [tmp_path / "a", tmp_path / "b"]
    for number, host in enumerate(hosts):
        shutil.copytree(alone, host)
        settings = host / "run.toml"
        text = settings.read_text().replace("[trainer]\n", HOSTS.format(number))
        settings.write_text(text.replace('path = "store"', f'path = "{hosts[0] / "store"}"'))
    shutil.rmtree(hosts[1] / "keys")
    settings = alone / "run.toml"
    settings.write_text(settings.read_text().replace("[trainer]\n", "[trainer]\ngpus = 2\n"))
    weights = StepwiseTrainer(alone).publish_versions(VERSIONS)
    others: list[Program] = []

    def start_other() -> None:
        run = ("--role", "trainer", "--run", str(hosts[1] / "run.toml"))
        others.append(Program(*run, log=tmp_path / "b.terminal", within=network.command_prefix("b")))

    def failures() -> list[int]:
        logs = hosts[0] / "logs" / "trainer-training.jsonl", hosts[1] / "logs" / "trainer-training-1.jsonl"
        events = [logged_events(log, "failed") for log in logs]
        return [sum("silent for 30 s" in event["error"] for event in found) for found in events]

    def join_again() -> None:
        eventually(lambda: min(failures()) > 0, "both hosts notice that the link is cut")
        network.connect("b", on=True)

    def harm(version: int) -> None:
        if version == 0:
            trainer.kill("trainer/train")
        if version == 1:
            others[-1].end()
            eventually(lambda: not members(others[-1].session), "the killed host")
            start_other()
        if version == 2:
            network.connect("b", on=False)
            Thread(target=join_again, daemon=True).start()

    start_other()
    try:
        trainer = StepwiseTrainer(hosts[0], within=network.command_prefix("a"))
        assert trainer.publish_versions(VERSIONS, when_published=harm, anchor=VERSIONS) == weights
        assert min(failures()) > 0
        ends = logged_events(hosts[0] / "logs" / "trainer-training.jsonl", "failed")
        assert [event for event in ends if "rank 1 on host 1 has been silent for 5 s" in event["error"]]
        # What the second host has uploaded: parts of patches, and the last files of anchors.
        uploads = logged_events(hosts[1] / "logs" / "trainer-upload.jsonl", "uploaded")
        assert ("put_part", "True") in {(event["call"], event["answer"]) for event in uploads}
        assert ("put_files", "(4, 5, 6, 7)") in {(event["call"], event["answer"]) for event in uploads}
        parts = [{path.parent.name for path in host.glob("**/checkpoints/*/*/*")} for host in hosts]
        assert parts == [{"00000"}, {"00001"}]
    finally:
        others[-1].end()
