"""A real trainer whose state is damaged, backed up, repaired and restored, and one whose ranks are on two hosts."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
import trio

from grailnode.config import load
from grailnode.node.node_makers import make_canary
from grailnode.node.telemetry import NodeTelemetry
from roles.policy.follower import Follower
from roles.ports import StateError
from tests.support.faults.full_disk import free_space
from tests.support.processes.command_line import fail, succeed
from tests.support.processes.namespaces import NamespaceNetwork
from tests.support.processes.programs import Program, eventually, logged_events, members, run_program
from tests.support.processes.stepwise_trainer import StepwiseTrainer, make_run
from tests.support.simulation.damaged_states import bend

pytestmark = pytest.mark.slow

BEFORE, AFTER = 2, 3  # versions


def objects(root: Path) -> dict[str, bytes]:
    files = (file for file in root.rglob("*") if file.is_file())
    return {str(file.relative_to(root)): file.read_bytes() for file in files if not file.name.startswith(".names")}


class Site:
    """The directory of a run with a trainer alone."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.objects = self.directory / "state" / "trainer" / "objects"
        self._options = ("--run", str(self.directory / "run.toml"), "--name", "trainer")

    def succeed(self, *arguments: str) -> str:
        """Run a command about the trainer's state, and return its output."""
        return succeed(*arguments, *self._options)

    def fail(self, *arguments: str) -> str:
        """Run a command about the trainer's state that must fail, and return its error."""
        return fail(*arguments, *self._options)

    def refusal(self) -> str:
        """Start the trainer, which refuses its state; return its lines."""
        result = run_program("--role", "trainer", *self._options)
        assert result.returncode == 1
        assert "Traceback" not in result.stderr
        assert "starting it again" not in result.stderr
        return result.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A stopped trainer with some versions; its backups are `one` and `two`, before and after the last of them."""
    site = Site(make_run(tmp_path_factory.mktemp("site") / "run"))
    StepwiseTrainer(site.directory).publish_versions(BEFORE - 1)
    site.succeed("backup", str(site.directory / "one"))
    StepwiseTrainer(site.directory).publish_versions(BEFORE, first=BEFORE - 1)
    site.succeed("backup", str(site.directory / "two"))
    return site


@pytest.fixture
def site(trained: Site, tmp_path: Path) -> Site:
    return Site(shutil.copytree(trained.directory, tmp_path / "run"))


def test_a_damaged_state_ends_a_trainer_in_one_line_until_it_is_repaired(site: Site):
    file = max(site.objects.glob("weights/*/*"))  # a kill may leave those of an older version beside the newest
    bend(0)(file)
    command = f"`grailnode repair --run {site.directory / 'run.toml'} --name trainer`"
    lines = [line for line in site.refusal().splitlines() if command in line]
    assert len(lines) == 1
    assert str(file) in lines[0]

    last_line = site.succeed("repair").splitlines()[-1]
    assert re.search(r"trainer: its state is whole now; \d+ objects? came from storage or what is left", last_line)
    assert site.succeed("repair").splitlines()[-1] == "trainer: its state is whole"


def test_the_state_of_a_canary_is_repaired_with_that_of_its_trainer(site: Site):
    canaries = ("--set", "trainer.canaries=1")
    config = load(site.directory / "run.toml", [canaries[1]])

    async def follow() -> int:
        follower = await Follower(make_canary(config, "trainer", NodeTelemetry("canary"))).open()
        await follower.refresh()
        assert follower.chain.trust is not None
        return follower.chain.trust.version

    assert trio.run(follow) == BEFORE
    bend(0)(site.directory / "state" / "trainer-canary-0" / "objects" / "trust")
    with pytest.raises(StateError, match=r"trainer-canary-0/objects/trust: damaged.*grailnode repair"):
        trio.run(follow)
    assert f"trust: version {BEFORE}, which storage shows now" in site.succeed("repair", *canaries)
    assert trio.run(follow) == BEFORE


def test_a_damaged_state_is_not_backed_up(site: Site):
    (site.objects / "chain" / "epoch").write_bytes(b"")
    error = site.fail("backup", str(site.directory / "three"))
    assert f"{site.objects / 'chain' / 'epoch'}: empty; " in error
    assert "only a whole state is copied" in error
    site.fail("restore", str(site.directory / "three"))


def test_the_newest_backup_is_the_state_that_the_trainer_left(site: Site):
    before = objects(site.objects)
    shutil.rmtree(site.objects)
    site.succeed("restore", str(site.directory / "two"))
    assert objects(site.objects) == before


def test_an_old_backup_is_refused_until_it_is_repaired(site: Site):
    shutil.rmtree(site.objects)
    site.succeed("restore", str(site.directory / "one"))
    refusal = site.refusal()
    assert "which this node's state did not publish" in refusal
    assert f"`grailnode repair --run {site.directory / 'run.toml'} --name trainer`" in refusal
    repaired = succeed("repair", "--run", str(site.directory))
    assert f"chain/: continues version {BEFORE}, the newest that storage shows" in repaired
    StepwiseTrainer(site.directory).publish_versions(AFTER, first=BEFORE)


def test_a_backup_is_not_restored_over_a_state_nor_damaged(site: Site):
    error = site.fail("restore", str(site.directory / "two"))
    assert f"{site.objects}: there is a state already; move it away first" in error
    shutil.rmtree(site.objects)
    file = max(path for path in (site.directory / "two").glob("trainer/objects/checkpoints/**/0*") if path.is_file())
    file.write_bytes(file.read_bytes()[:-1])
    assert str(file) in site.fail("restore", str(site.directory / "two"))
    assert not site.objects.exists()


def test_neither_backup_nor_repair_touches_the_state_of_a_running_node(site: Site):
    log = site.directory / "logs" / "trainer-upload.jsonl"
    starts = log.read_text().count('"started"')
    trainer = StepwiseTrainer(site.directory)
    two, three = str(site.directory / "two"), str(site.directory / "three")
    try:
        eventually(lambda: log.read_text().count('"started"') > starts, "the trainer's start")
        for arguments in (("backup", three), ("repair",), ("restore", two)):
            assert "in use by another" in site.fail(*arguments)
    finally:
        trainer.end()


def test_a_backup_needs_a_new_directory_and_a_state(site: Site):
    assert "is not empty" in site.fail("backup", str(site.directory / "two"))
    with free_space(100):
        assert f"{site.directory / 'three' / 'trainer'}" in site.fail("backup", str(site.directory / "three"))
    assert not list((site.directory / "three").iterdir())
    shutil.rmtree(site.objects)
    assert "no such state; is --name the name of the node?" in site.fail("backup", str(site.directory / "three"))


# Two hosts as network namespaces: one is killed, and their link is cut


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
