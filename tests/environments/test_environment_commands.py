"""`grailnode environments`: tasks are listed, tried, and checked against their contract."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from grailnode.engine.policy import PACKAGED_POLICY
from grailnode.environments import registry
from tests.support.builders.plugins import PAGES, files_of_page, install, install_metadata, install_module
from tests.support.builders.tasks import OWN, open_sandbox
from tests.support.processes.command_line import fail, run_command, succeed
from tests.support.processes.programs import ENVIRONMENT, ROOT


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_sandbox()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cache")
def test_the_guides_task_keeps_its_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_of_page()
    assert max(len(files[name].strip().splitlines()) for name in ("doubled_digits.py", "higher_lower.py")) <= 30
    monkeypatch.syspath_prepend(install(files, tmp_path))
    listed = succeed("environments")
    assert "doubled-digits   doubled-digits 1.0" in listed
    assert re.search("^verifiers .* no example: .* the configuration names no taskset", listed, re.MULTILINE)
    assert "gsm8k            problems in this form are read by" in succeed("environments", "list")
    for name in ("doubled-digits", "higher-lower"):
        output = succeed("environments", "check", name)
        assert [line[:2] for line in output.splitlines()] == ["ok"] * 9
    assert succeed("environments", "try", "doubled-digits", "--answer", "592").endswith("\nreward: 1\n")
    game = [f"--answer={number}" for number in (10, 99)]
    assert succeed("environments", "try", "higher-lower", *game) == "10-99=\nreply: +=\nreply: -=\nreward: 0\n"
    assert "9 answers, and an episode of 'higher-lower' has 8 turns" in fail(
        "environments", "try", "higher-lower", *["--answer=1"] * 9, code=2
    )
    assert "configuration that is no JSON object" in fail(
        "environments", "try", "doubled-digits", "--environment-config", "[]"
    )
    for page in PAGES:
        options = re.findall(r"^grailnode init my-run (.*)$", page.read_text(), re.MULTILINE)[0]
        succeed("init", str(tmp_path / page.stem), *shlex.split(options))


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
        return 1.0 if completion == "zzz" else 2 if completion == "42" else 1 / len(completion[:80])
"""


@pytest.mark.usefixtures("cache")
def test_a_broken_contract_is_named_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install_module("broken-task", BROKEN, tmp_path))
    result = run_command("environments", "check", "broken-task")
    assert result.returncode == 1
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
    wrong = "an empty answer: ZeroDivisionError: division by zero; a number: a reward of 2.0, not a number in [0, 1]"
    for part in ("200 seeds", "200 held-out", wrong, "1.0 for 'zzz'"):
        assert sum(part in line for line in failed) == 1
    assert result.stderr == "Error: environment 'broken-task' does not keep its contract\n"


HOSTILE = """
class Task:
    exact, held_out_size, turns = True, 5, 2
    def __init__(self, config): pass
    def problem(self, seed): return {"prompt": "a\\x1b[2J\\nb", "reference": 1}
    def held_out_problem(self, index): return {"prompt": "c\\x1b[2J", "reference": 1}
    def begin(self, problem, seed): return self
    def step(self, text): return "d\\x1b]0;e\\x07\\ud800" if text else 1 / 0
    def reward(self): return 1
"""


@pytest.mark.usefixtures("cache")
def test_a_plugin_writes_nothing_to_the_terminal_but_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install_module("hostile", HOSTILE, tmp_path))
    assert "hostile 1.0              c\ufffd[2J\n" in succeed("environments", "list")
    output = succeed("environments", "try", "hostile", "--answer", "1")
    assert output == "a\ufffd[2J\nb\nreply: d\ufffd]0;e\ufffd\ufffd\nreward: 1\n"
    assert "'hostile': ZeroDivisionError: division by zero" in fail("environments", "try", "hostile", "--answer", "")
    second = install_module("second", HOSTILE, tmp_path / "second")
    entry_points = second / "second-1.0.dist-info" / "entry_points.txt"
    entry_points.write_text("[grailnode.environments]\nhostile = second:Task\n")
    monkeypatch.syspath_prepend(second)
    assert "second 1.0 and hostile 1.0 both have this name" in fail("environments", "check", "hostile")


def test_a_plugin_that_claims_the_name_of_a_built_in_environment_is_refused_by_founders_and_ignored_by_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = registry.built_in_spec("addition")
    monkeypatch.syspath_prepend(install_module("addition", "", tmp_path))
    reason = "environment 'addition': addition 1.0 and grailnode 0.1.0 both have this name; uninstall one of them"
    for command in (("environments", "try", "addition"), ("init", str(tmp_path / "run"), "--environment", "addition")):
        assert reason in fail(*command)
    assert registry.distributions()["addition"] == "addition 1.0 and grailnode 0.1.0"
    registry.check_code(spec)


@pytest.mark.parametrize("name", ["addition", "chess"])
def test_an_installation_that_is_older_than_its_code_is_to_be_repeated(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = "[grailnode.environments]\nchess = protocol.environments.chess:Chess\n"
    monkeypatch.syspath_prepend(install_metadata("grailnode", points, tmp_path))
    again = f"rm -rf {ROOT}/grailnode.egg-info; pip install -e {ROOT}"
    reason = f"environment '{name}': grailnode was installed before its code changed: {again}\n"
    for command in (("environments", "check", name), ("init", str(tmp_path / "run"), "--environment", name)):
        assert fail(*command).endswith(reason)


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


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("gsm8k", "problems in this form are read by --environment math --data FILE"),
        ("openai/GSM8K", "problems in this form are read by --environment math --data FILE"),
        ("mbpp", f"problems in this form are read by --environment code-{OWN} --data FILE"),
        ("reasoning_gym/countdown", "a task of --environment reasoning-gym: name it in --environment-config"),
        ("textarena", "a plug-in: pip install ./examples/textarena in a checkout of grailnode"),
    ],
)
def test_a_name_that_others_use_is_answered_with_what_to_do(name: str, advice: str) -> None:
    assert f"environment '{name}': {advice}" in fail("init", "run", "--environment", name)
    for verb in ("try", "check"):
        assert f"environment '{name}': {advice}" in fail("environments", verb, name)


def test_what_is_no_number_file_or_name_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("{")
    data = ("--data", str(tmp_path / "data"))
    for verb in ("try", "check"):
        assert "line 1: not JSON in UTF-8" in fail("environments", verb, "math", *data)
        assert "unknown environment 'a\\nb'" in fail("environments", verb, "a\nb")
    assert "'--seed'" in fail("environments", "try", "addition", "--seed", str(1 << 300), code=2)
