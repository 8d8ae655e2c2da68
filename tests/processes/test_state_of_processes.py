"""Backup, damage, repair and restore of a real trainer: it ends with one line, and goes on after a repair."""

import re
import shutil
from pathlib import Path

import pytest
import trio

from grailnode.config import load
from grailnode.node.node_makers import make_canary
from grailnode.node.telemetry import NodeTelemetry
from roles.policy.follower import Follower
from roles.ports import StateError
from tests.support.faults.full_disk import free_space
from tests.support.processes.command_line import fail, succeed
from tests.support.processes.programs import eventually, run_program
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
