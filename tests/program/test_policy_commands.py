"""`grailnode evaluate` and `grailnode chat` of a checkpoint; tests/network/test_results.py has them of a run."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from grailnode.cli.actions.policy_evaluation import pass_rate
from grailnode.engine.policy import PACKAGED_POLICY
from tests.support.builders.plugins import install_module
from tests.support.processes.command_line import run_command, succeed

GENESIS = str(PACKAGED_POLICY)
YES = """
class Task:
    def __init__(self, config):
        pass
    exact, held_out_size = True, 3
    def problem(self, seed):
        return {"prompt": f"{seed[0]}=", "reference": None}
    def held_out_problem(self, index):
        return {"prompt": f"{index}=", "reference": None, "stratum": f"kind {index}"}
    def reward(self, problem, completion):
        return 1.0
"""


def rates(*arguments: str) -> dict[tuple[str, int], tuple[float, float, float]]:
    """Return value and interval by kind and k."""
    result = json.loads(succeed("evaluate", GENESIS, "--json", *arguments))
    return {(row["kind"], row["k"]): (row["value"], row["low"], row["high"]) for row in result["rates"]}


def test_a_checkpoint_is_evaluated_on_a_task_with_intervals() -> None:
    few, many = [
        rates("--environment", "addition", "--k", "4,1", "--problems", number, "--temperature", "0.7")
        for number in ("8", "64")
    ]
    assert list(many) == [("", 1), ("", 4)]
    for k in (1, 4):
        value, low, high = many["", k]
        assert 0.3 < low < value < high <= 1
        assert high - low < few["", k][2] - few["", k][1]
    assert many["", 1][0] < many["", 4][0]
    text = succeed("evaluate", GENESIS, "--environment", "addition", "--problems", "8")
    assert text.startswith(f"{GENESIS}: 8 held-out problems, the most likely completion of each\npass@1   ")


def test_episodes_are_played_to_their_ends() -> None:
    value, low, high = rates("--environment", "wordle", "--problems", "4", "--turns", "2")["", 1]
    assert low == 0 <= value < high < 1


def test_a_plug_in_is_asked_in_its_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install_module("always-yes", YES, tmp_path))
    kinds = rates("--environment", "always-yes", "--max-tokens", "2")
    assert [kind for kind, _ in kinds] == ["", "kind 0", "kind 1", "kind 2"]
    assert {value for value, _, _ in kinds.values()} == {1.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("evaluate --environment addition", "give a DIRECTORY with a checkpoint, or --run"),
        (f"evaluate {GENESIS} --run run.toml --environment addition", "give a DIRECTORY with a checkpoint, or --run"),
        (f"evaluate {GENESIS}", "--environment NAME is missing"),
        ("evaluate --run run.toml --data run.toml", "--data: the run has its own"),
        (f"evaluate {GENESIS} --environment addition --k 8 --samples 4", "--k 8: needs at least as many --samples"),
        (f"evaluate {GENESIS} --environment addition --k 1,,2", "write numbers from 1 to 64"),
        ("chat --message hello", "give a DIRECTORY with a checkpoint, or --run"),
    ],
)
def test_what_cannot_be_asked_is_refused(arguments: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("# all defaults\n")
    result = run_command(*arguments.split(), cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.parametrize(("problems", "samples", "k"), [(30, 1, 1), (30, 8, 1), (60, 8, 4), (200, 4, 1)])
def test_the_interval_holds_the_rate_of_all_problems(problems: int, samples: int, k: int) -> None:
    random = Random(problems + samples)
    for mean, spread in ((0.05, 0.05), (0.5, 0.0), (0.5, 0.5), (0.9, 0.1)):
        trials, held = 400, 0
        chances = [mean - spread, mean + spread]
        truth = sum(1 - (1 - chance) ** k for chance in chances) / 2
        for _ in range(trials):
            right = [0] * (samples + 1)
            for _ in range(problems):
                chance = random.choice(chances)
                right[sum(random.random() < chance for _ in range(samples))] += 1
            rate = pass_rate(right, k)
            assert 0 <= rate.low <= rate.value <= rate.high <= 1
            held += rate.low <= truth <= rate.high
        assert held / trials > 0.92, (mean, spread)


def test_a_message_is_answered_once() -> None:
    assert succeed("chat", GENESIS, "--message", "12+34=", "--greedy") == "46\n"


def test_lines_are_answered_until_the_end_of_the_input() -> None:
    command = [sys.executable, "-m", "grailnode", "chat", GENESIS, "--greedy"]
    result = subprocess.run(command, input=b"12+34=\n\n\x1b[2J\xff\n21+11=", capture_output=True, check=True)
    answers = result.stdout.decode().split("\n")
    assert answers[0] == "46"
    assert answers[-2:] == ["32", ""]
    assert b"Ctrl-D ends" in result.stderr


def test_ctrl_c_in_a_terminal_ends_it() -> None:
    terminal, own = pty.openpty()
    command = [sys.executable, "-m", "grailnode", "chat", GENESIS, "--greedy"]
    process = subprocess.Popen(command, stdin=own, stdout=own, stderr=own, start_new_session=True)
    os.close(own)
    try:
        shown = read_until(terminal, b"> ")
        os.write(terminal, b"12+34=\n")
        shown += read_until(terminal, b"46\r\n> ")
        process.send_signal(signal.SIGINT)
        assert process.wait(600) == 130
        assert b"Traceback" not in shown + read_rest(terminal)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def read_until(terminal: int, ending: bytes) -> bytes:
    shown, deadline = b"", time.monotonic() + 240
    while not shown.endswith(ending):
        assert time.monotonic() < deadline, shown
        shown += os.read(terminal, 4096)
    return shown


def read_rest(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # nobody has the other side open
        return b""
