"""The network as real processes over a real directory, killed with kill -9 in mid-window."""

import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from grailnode.engine.policy import PACKAGED_POLICY
from grailnode.run import workspace
from grailnode.run.creation import Choices
from tests.support.command_line import run_command
from tests.support.processes.programs import Program, eventually, members

CHOICES = Choices(group_size=8, groups=6)
PACE = workspace.Pace(period_ms=250, groups_per_step=4, groups=6, evaluation_problems=16, anchor_interval=5)


class Site:
    """A run's directory and the programs started on it."""

    def __init__(self, directory: Path, choices: Choices = CHOICES, policy: Path = PACKAGED_POLICY) -> None:
        self.made = workspace.create(directory, choices, PACE, policy=policy)
        self.programs: dict[str, Program] = {}

    def start(self, role: str, name: str) -> Program:
        log = self.made.directory / f"{name}.terminal"
        program = Program("--role", role, "--run", str(self.made.config), "--name", name, log=log)
        self.programs[name] = program
        return program

    def events(self, process: str, event: str) -> list[dict[str, Any]]:
        file = self.made.directory / "logs" / f"{process}.jsonl"
        if not file.exists():
            return []
        found = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
        return [item for item in found if item["event"] == event]

    def published(self) -> int:
        return max((event["version"] for event in self.events("trainer-upload", "published")), default=-1)

    def progress(self) -> tuple[int, int]:
        """The newest version, and how many verdicts there are."""
        return self.published(), len(self.events("validator", "verdict"))

    def is_beyond(self, before: tuple[int, int]) -> bool:
        """Whether two versions and a verdict have come since."""
        version, verdicts = self.progress()
        return version >= before[0] + 2 and verdicts > before[1]


def gone(program: Program) -> None:
    """Wait until nothing of a program is left."""
    eventually(lambda: not members(program.session), f"no process of {program.log.stem} is left")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    for program in site.programs.values():
        program.end()


def test_every_role_survives_kill_9_and_the_chain_stays_whole(site: Site):
    roles = {"trainer": "trainer", "validator": "validator", "miner-1": "miner", "miner-2": "miner"}
    for name, role in roles.items():
        site.start(role, name)
    eventually(lambda: site.published() >= 2, "the first versions")

    for name in ("miner-1", "validator", "trainer"):
        killed = site.programs[name]
        killed.kill()
        gone(killed)
        progress = site.progress()
        site.start(roles[name], name)
        eventually(partial(site.is_beyond, progress), f"new versions and verdicts after {name} came back")

    training = members(site.programs["trainer"].session)[-1]  # the newest process: one that the supervisor started
    progress = site.progress()
    os.kill(training, signal.SIGKILL)
    eventually(partial(site.is_beyond, progress), "progress after a process of the trainer was killed")

    for program in site.programs.values():
        program.interrupt()
    for program in site.programs.values():
        program.wait()
        gone(program)

    checked = run_command("verify", "--run", str(site.made.config))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"version {site.published()} holds" in checked.stdout
    versions = [event["version"] for event in site.events("trainer-upload", "published")]
    assert versions == sorted(versions)
    assert set(versions) == set(range(versions[-1] + 1))
    verdicts = site.events("validator", "verdict")
    assert verdicts
    assert all(verdict["rejected"] == 0 for verdict in verdicts)
    digests: dict[int, set[str]] = {}
    for name in ("miner-1", "miner-2", "validator"):
        for event in site.events(name, "serving"):
            digests.setdefault(event["version"], set()).add(event["weights"])
    assert all(len(found) == 1 for found in digests.values())

    for patch in (site.made.directory / "store").glob("*/patches/*"):
        data = patch.read_bytes()
        patch.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    caught = run_command("verify", "--run", str(site.made.config))
    assert caught.returncode == 1
    assert "not the bytes that the manifest names" in caught.stderr
    assert len(caught.stderr.splitlines()) == 1

    shown = run_command("status", "--run", str(site.made.config))
    assert shown.returncode == 0, shown.stderr
    assert "miner-1" in shown.stdout


def test_a_terminal_that_takes_nothing_stops_no_node(site: Site):
    terminal = Path("/dev/full")
    trainer = Program("--role", "trainer", "--run", str(site.made.config), log=terminal)
    site.programs["trainer"] = trainer
    eventually(lambda: site.published() >= 0, "the first version")
    before = members(trainer.session)
    os.kill(before[-1], signal.SIGKILL)
    eventually(lambda: bool(set(members(trainer.session)) - set(before)), "a process in the place of the killed one")
    assert trainer.process.poll() is None
    trainer.interrupt()
    assert trainer.wait() == 0
    gone(trainer)
