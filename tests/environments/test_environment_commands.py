"""`grailnode environments`: tasks are listed, tried, and checked against their contract."""

import subprocess
import sys
from pathlib import Path

import pytest

from grailnode.engine.policy import PACKAGED_POLICY
from tests.support.builders.plugins import files_of_page, install, install_module
from tests.support.builders.tasks import OWN, open_sandbox
from tests.support.processes.command_line import fail, run_command, succeed
from tests.support.processes.programs import ENVIRONMENT


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


@pytest.mark.parametrize("verb", ["try", "check"])
def test_options_that_a_built_in_environment_does_not_take_are_refused(tmp_path: Path, verb: str) -> None:
    (tmp_path / "data").write_text("{}")
    command = ("environments", verb, "addition")
    assert "'addition' takes no data file: drop --data" in fail(*command, "--data", str(tmp_path / "data"))
    assert "'addition' takes no configuration: drop --environment-config" in fail(
        *command, "--environment-config", '{"most": 9}'
    )


TRY_POLICY = """
import sys, threading
from grailnode.cli.main import main
try:
    main()
finally:
    print([thread.name for thread in threading.enumerate()], file=sys.stderr)
"""


def test_a_policy_plays_an_episode_and_no_thread_is_left_that_may_free_tensors_while_python_ends() -> None:
    policy = str(PACKAGED_POLICY.parent / "calculator")
    command = (sys.executable, "-c", TRY_POLICY, "environments", "try", "calculator", "--policy", policy)
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    assert lines[0] == "65*58+80>" or lines[0].endswith(">")
    assert any(line.startswith("the policy continues: ") for line in lines)
    assert any(line.startswith("reply: ") for line in lines)
    assert lines[-1].startswith("reward: ")
    assert result.stderr == "['MainThread']\n"


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
