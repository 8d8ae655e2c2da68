"""`grailnode environments`: tasks are listed, tried, and checked against their contract."""

from pathlib import Path

import pytest

from tests.support.builders.plugins import files_of_page, install, install_module
from tests.support.builders.tasks import OWN, open_sandbox
from tests.support.processes.command_line import fail, run_command, succeed


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_sandbox()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cache")
def test_the_guides_task_keeps_its_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_of_page()
    assert max(len(files[name].strip().splitlines()) for name in ("doubled_digits.py", "higher_lower.py")) <= 30
    monkeypatch.syspath_prepend(install(files, tmp_path))
    assert "doubled-digits   doubled-digits 1.0" in succeed("environments")
    for name in ("doubled-digits", "higher-lower"):
        output = succeed("environments", "check", name)
        assert [line[:2] for line in output.splitlines()] == ["ok"] * 9
    assert succeed("environments", "try", "doubled-digits", "--answer", "1").endswith("\nreward: 0\n")
    game = [f"--answer={number}" for number in (10, 99)]
    assert succeed("environments", "try", "higher-lower", *game) == "10-99=\nreply: +=\nreply: -=\nreward: 0\n"
    assert "9 answers, and an episode of 'higher-lower' has 8 turns" in fail(
        "environments", "try", "higher-lower", *["--answer=1"] * 9, code=2
    )
    assert "configuration that is no JSON object" in fail(
        "environments", "try", "doubled-digits", "--environment-config", "[]"
    )


BROKEN = """
import random
class Task:
    exact = True
    held_out_size = None
    def __init__(self, config): pass
    def problem(self, seed):
        return {"prompt": str(hash("a" + seed.hex())), "reference": 1}
    def held_out_problem(self, index):
        return {"prompt": str(random.SystemRandom().random()), "reference": 1}
    def reward(self, problem, completion):
        return 1.0 if completion == "zzz" else 1 / len(completion)
"""


@pytest.mark.usefixtures("cache")
def test_a_broken_contract_is_named_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install_module("broken-task", BROKEN, tmp_path))
    result = run_command("environments", "check", "broken-task")
    assert result.returncode == 1
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
    for part in ("200 seeds", "200 held-out", "an empty answer gave CallError: ZeroDivisionError", "1.0 for 'zzz'"):
        assert sum(part in line for line in failed) == 1
    assert result.stderr == "Error: environment 'broken-task' does not keep its contract\n"


@pytest.mark.slow
def test_a_built_in_environment_keeps_the_contract() -> None:
    assert "FAILED" not in succeed("environments", "check", "addition")
    assert "unknown environment 'chess'" in fail("environments", "check", "chess")


@pytest.mark.parametrize(("data_set", "reader"), [("gsm8k", "math"), ("mbpp", f"code-{OWN}")])
def test_the_name_of_a_data_set_gives_the_environment_that_reads_its_form(data_set: str, reader: str) -> None:
    line = f"problems in this form are read by --environment {reader} --data FILE"
    assert f"environment '{data_set}': {line}" in fail("init", "run", "--environment", data_set)
    assert f"environment '{data_set}': {line}" in fail("environments", "try", data_set)
    assert f"{data_set:<16} {line}" in succeed("environments")
