"""A run on one's own programming tasks, as real processes with the real sandbox; and what a node says that cannot take
part.
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from grailnode.run.creation import Choices
from grailnode.sandbox import BubblewrapSandbox
from protocol import paths
from protocol.identity.signing import open_announced
from protocol.judging.verdict import Verdict
from tests.processes.test_network_of_processes import Site
from tests.sandbox.conftest import OWN, sandbox
from tests.support.builders.phrase_policies import write_speaking_policy
from tests.support.command_line import run_command
from tests.support.processes.programs import Program, eventually, members

__all__ = ["sandbox"]

RIGHT = "<think>a</think><solution>def f(x): return x + 1</solution>"
HALF = "<solution>def f(x): return 2</solution>"
HOSTILE = "<solution>import os\nwhile True: os.fork()</solution>"
DUE = {1.0, 0.55, 0.2, 0.0}  # as rewards: of these three, and of what is no solution


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    tests = ["assert f(1) == 2", "assert f(2) == 3"]
    tasks = [{"text": f"Task {number}.", "code": "def f(x): return 1 + x", "test_list": tests} for number in range(20)]
    data = tmp_path / "my tasks.jsonl"
    data.write_text("\n".join(map(json.dumps, tasks)))
    write_speaking_policy(tmp_path / "policy", [RIGHT, HALF, HOSTILE])
    choices = Choices(environment=f"code-{OWN}", data=data, max_tokens=1, group_size=4, groups=2, rounds=20)
    choices = Choices(
        **{**choices.__dict__, "commit_rounds": 14, "audit_rounds": 16, "seal_rounds": 40, "verdict_rounds": 60}
    )
    site = Site(tmp_path / "run", choices, tmp_path / "policy")
    data.unlink()  # the run has its own copy
    yield site
    for program in site.programs.values():
        program.end()


def verdicts(site: Site) -> list[Verdict]:
    """All verdicts in the store."""
    store = site.made.directory / "store"
    files = (store / paths.verdicts(site.made.keys["validator"], 0)).parent.rglob("*")
    return [open_announced(file.read_bytes(), Verdict).record for file in files if file.is_file()]


def seen(site: Site) -> set[float]:
    """All rewards in the store's verdicts."""
    return {reward for verdict in verdicts(site) for judgement in verdict.judgements for reward in judgement.rewards}


def gone(program: Program) -> bool:
    """Whether nothing of a program is left."""
    return not members(program.session)


def test_programs_are_written_tried_and_trained_on(sandbox: BubblewrapSandbox, site: Site):
    assert sandbox.python == OWN
    for role, name in (("trainer", "trainer"), ("validator", "validator"), ("miner", "miner-1")):
        site.start(role, name)
    eventually(lambda: {r for v in verdicts(site) for j in v.judgements for r in j.rewards} >= DUE - {0.0}, "verdicts")
    eventually(lambda: site.published() >= 1, "a version that was trained on them")
    for program in site.programs.values():
        program.interrupt()
    for program in site.programs.values():
        program.wait()
        eventually(partial(gone, program), f"nothing of {program.log.stem} is left")
    judgements = [judgement for verdict in verdicts(site) for judgement in verdict.judgements]
    assert all(judgement.accepted for judgement in judgements)
    assert seen(site) <= DUE


def started(site: Site, role: str, name: str) -> list[str]:
    """What a node says that ends at once."""
    ended = run_command("--role", role, "--run", str(site.made.config), "--name", name)
    assert ended.returncode == 1
    return ended.stderr.splitlines()


@pytest.mark.parametrize(("role", "name"), [("miner", "miner-1"), ("validator", "validator")])
def test_a_node_without_a_sandbox_does_not_join(
    site: Site, role: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lonely = tmp_path / "bin"
    lonely.mkdir()
    monkeypatch.setenv("PATH", str(lonely))
    (line,) = started(site, role, name)
    assert line.startswith("grailnode: running programs needs bubblewrap, and there is no bwrap on the PATH: install")
    assert not [path for path in (site.made.directory / "store").rglob("*") if path.is_file()]


def test_a_trainer_whose_data_file_was_changed_does_not_start(site: Site):
    data = site.made.directory / "data.jsonl"
    data.write_bytes(data.read_bytes().replace(b"Task 3", b"Task X"))
    (line,) = started(site, "trainer", "trainer")
    assert "data.jsonl: not the data file of this run" in line


def test_a_node_that_is_shown_another_data_file_waits_for_the_right_one(sandbox: BubblewrapSandbox, site: Site):
    assert sandbox.python == OWN
    trainer = site.start("trainer", "trainer")
    files = site.made.directory / "store" / site.made.keys["trainer"].hex() / "files"
    eventually(lambda: files.exists() and len(list(files.iterdir())) == 3, "the run's files")
    trainer.end()
    (data,) = [file for file in files.iterdir() if file.read_bytes().startswith(b'{"text"')]
    right = data.read_bytes()
    data.write_bytes(right.replace(b"Task 3", b"Task X"))
    miner = site.start("miner", "miner-1")
    eventually(lambda: bool(site.events("miner-1", "files-missing")), "a line that says so")
    (line,) = site.events("miner-1", "files-missing")
    assert line["error"] == "data.jsonl: not the file that the run names, as storage shows it now"
    kept = site.made.directory / "state" / "miner-1" / "data" / "data.jsonl"
    assert not kept.exists()
    data.write_bytes(right)
    eventually(kept.exists, "the right file")
    assert kept.read_bytes() == right
    assert "Traceback" not in miner.log.read_text()
