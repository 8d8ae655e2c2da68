"""The environment `reasoning-gym`: which answers it lets a task execute, and the contract of some tasks."""

import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from grailnode.environments import contract, registry
from grailnode.environments.extras.reasoning_gym import ReasoningGym, answer_of, is_scored
from grailnode.environments.wheels import PluginError, closure
from protocol.environments.base import SandboxError
from tests.support.builders.plugins import install_example, install_metadata, install_module
from tests.support.builders.tasks import NO_GYM, open_sandbox
from tests.support.processes.programs import ENVIRONMENT, PATIENCE, ROOT

SAMPLE = ("countdown", "gcd", "isomorphic_strings", "survo")


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        *(("countdown", "(3 + 4)*5 - 12/6"), ("puzzle24", "8/(3 - 8/3)"), ("gcd", "12"), ("n_queens", "Q _\n_ Q")),
        *(("simple_integration", "x**3/3 + 0.5*x**(-1/2) + C"), ("spiral_matrix", "[1, 2, 3]")),
        *(("intermediate_integration", "exp(2*x)*sin(x)**2/5 - (x + 1)**11 + C"), ("string_insertion", "ABCDE")),
        *(("polynomial_multiplication", "6*x**2 - 12*x*y + 7"), ("binary_matrix", '[["0", "1"]]')),
    ],
)
def test_right_answers_are_scored(task: str, answer: str) -> None:
    assert is_scored(task, answer_of(f"I think <answer>1</answer>, no: <answer> {answer} </answer>."))
    assert is_scored(task, answer_of(answer))


HOSTILE = {
    "countdown": ("__import__('os')", "9**9", "9 **9", "x", "1" * 301),
    "simple_integration": (
        *("9**9**9", "9**999", "9**(99)**9", "(((9)**99)**99)**99", "x.subs(x)", "factorial(9)"),
        *("Integral(x, x)", "lambda: 1", "sin", "1" * 13, "1.5.5", "x//2", "xx", "_", "9**" + "(" * 9 + "9"),
    ),
    "polynomial_multiplication": ("exit()", "x**y", "x**-999", "\u00b2"),
    "n_queens": ("exec('1')", "[1]*9", "(1)", "[x for x in y]", "entry", "A.B"),
    "coin_flip": ("1e9999", "1E+99999", "1" * 50_001),
}


@pytest.mark.parametrize(("task", "answer"), [(task, answer) for task in HOSTILE for answer in HOSTILE[task]])
def test_programs_and_large_numbers_are_not_scored(task: str, answer: str) -> None:
    assert not is_scored(task, answer)


@pytest.mark.parametrize("task", ["game_of_life_halting", "codeio", "composite", "sokoban"])
def test_a_refused_task_says_why(task: str) -> None:
    with pytest.raises(ValueError, match=f"task '{task}' is refused: .+"):
        ReasoningGym({"tasks": {"gcd": {}, task: {}}})


def test_a_configuration_without_a_task_is_answered_with_one_that_has_it() -> None:
    with pytest.raises(ValueError, match=r'names no task, as in \{"task": "countdown"\}'):
        ReasoningGym({})


@pytest.mark.parametrize("other", ["levls", "task"])
def test_an_option_beside_the_tasks_that_would_change_nothing_is_refused(other: str) -> None:
    with pytest.raises(ValueError, match=f"beside `tasks` there may be `levels` alone, and not {other}"):
        ReasoningGym({"tasks": {"gcd": {}}, "levels": 4, other: 4})


REPLACING = """
[grailnode.environments]
light = light:Task
[grailnode.replacements]
pytest = light:Pytest
numpy = heavy:Numpy
"""


def test_an_environment_does_without_what_its_module_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install_metadata("light", REPLACING, tmp_path, ("numpy", "pytest")))
    assert names_of_closure("light") == ["light", "numpy"]


def test_an_extra_needs_its_own_requirements_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requires = ("torch", "numpy; extra == 'light'", "pytest; extra == 'heavy'", "absent; extra == 'absent'")
    points = "[grailnode.environments]\nlight = a:Task\nabsent = b:Task\n"
    monkeypatch.syspath_prepend(install_metadata("grailnode", points, tmp_path, requires))
    assert names_of_closure("light") == ["numpy"]
    with pytest.raises(PluginError, match=r"absent: environment 'absent' requires it, .*install 'grailnode\[absent\]'"):
        names_of_closure("absent")


def names_of_closure(name: str) -> list[str]:
    (point,) = entry_points(group="grailnode.environments", name=name)
    return [part.metadata["Name"] for part in closure(point)]


@pytest.mark.slow
@pytest.mark.parametrize("levels", [1, 3])
def test_some_tasks_keep_the_contract(levels: int) -> None:
    result = run_with_gym("-m", "bench.reasoning_gym", "--problems", "10", "--levels", str(levels), *SAMPLE)
    assert result.returncode == 0, result.stdout + result.stderr


LARGE_NUMBERS = """
import resource
from hashlib import sha256
from grailnode.environments.extras.reasoning_gym import ReasoningGym

tasks = ReasoningGym({"task": "number_sequence"})
usage = resource.getrusage(resource.RUSAGE_SELF)
resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + 5,) * 2)
print(tasks.problem(sha256(b"6").digest())["prompt"])
"""


@pytest.mark.slow
def test_a_sequence_whose_numbers_grow_without_bound_is_discarded_at_once() -> None:
    """The task tries four squares in a row for this seed, which takes it 13 seconds of processor time."""
    result = run_with_gym("-c", LARGE_NUMBERS)
    assert (result.returncode, result.stdout) == (0, "-1, -1, -2, -3, ?\n"), result.stderr


def run_with_gym(*arguments: str) -> subprocess.CompletedProcess[str]:
    python = os.environ.get("GRAILNODE_GYM_PYTHON", "")
    if not Path(python).is_file():
        pytest.skip(NO_GYM)
    return subprocess.run(
        (python, *arguments),
        cwd=ROOT,
        env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE,  # most of it is spent on packing, which waits for the disk
        check=False,
    )


# The plug-ins of examples/ with games of Gymnasium and TextArena, from their wheels in the sandbox


STEPS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


@pytest.fixture(scope="module", params=["gymnasium", "textarena"])
def games(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Install a plug-in of examples/ beside the packages of another environment; yield the name of its folder."""
    open_sandbox()
    packages = run_with_gym("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    directory = tmp_path_factory.mktemp("games")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(install_example(request.param, directory)), *sys.path, packages])
        patch.setenv("XDG_CACHE_HOME", str(directory / "cache"))  # the packages are packed once
        yield request.param


@pytest.mark.slow
@pytest.mark.parametrize("games", ["gymnasium"], indirect=True)
def test_a_lake_is_crossed_by_the_actions_of_a_path(games: str) -> None:
    with pytest.raises(SandboxError, match="takes turns and options, and no 'rules'"):
        registry.open_plugin("frozen-lake", '{"rules": "none"}')
    environment = registry.open_plugin("frozen-lake", "{}").environment
    problem = environment.problem(bytes(32))
    rows = problem.prompt.splitlines()[1:5]
    paths = deque([((0, 0), list[str]())])
    while paths:
        (row, column), path = paths.popleft()
        if rows[row][column] == "G":
            break
        for action, (down, right) in STEPS.items():
            place = row + down, column + right
            if len(path) < 8 and min(place) >= 0 and max(place) < 4 and rows[place[0]][place[1]] != "H":
                paths.append((place, [*path, action]))
    episode = environment.begin(problem, bytes(32))
    replies = [episode.step(action) for action in path]
    assert replies[-1] is None and None not in replies[:-1]
    assert all(reply is None or reply.count("@") == 1 for reply in replies)
    assert episode.reward() == 1.0
    environment.close()


ECHO = """
import gymnasium
from grailnode_gymnasium import TextTask

class Echo(gymnasium.Env):
    action_space = observation_space = gymnasium.spaces.Text(3, charset="0123456789")

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.word = str(self.np_random.integers(100, 999))
        return self.word, {}

    def step(self, action):
        return f"not {action}", float(action == self.word), action == self.word, False, {}

gymnasium.register("Echo-v0", Echo)

class Task(TextTask):
    name, rules = "Echo-v0", "Repeat this number."
"""


@pytest.mark.slow
@pytest.mark.parametrize("games", ["gymnasium"], indirect=True)
def test_an_environment_of_texts_is_brought_by_a_plugin_that_requires_this_one(
    games: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install_module("echo", ECHO, tmp_path, ("grailnode-gymnasium",)))
    plugin = registry.open_plugin("echo", "{}")
    assert {"echo", "grailnode-gymnasium", "gymnasium"} < {wheel.ref.distribution for wheel in plugin.wheels}
    problem = plugin.environment.problem(bytes(32))
    rules, number = problem.prompt.splitlines()
    episode = plugin.environment.begin(problem, bytes(32))
    assert (rules, episode.step("7"), episode.step(number)) == ("Repeat this number.", "not 7\n", None)
    assert episode.reward() == 1.0
    plugin.environment.close()
    checked("echo", "{}")


CONFIGS = {
    "gymnasium": {
        "frozen-lake": '{"options": {"is_slippery": true}}',
        "cliff-walking": '{"options": {"is_slippery": true}}',
        "taxi": "{}",
        "blackjack": "{}",
    },
    "textarena": {"textarena": '{"game": "Countdown-v0"}'},
}


@pytest.mark.slow
def test_games_keep_the_contract(games: str) -> None:
    for name, config in CONFIGS[games].items():
        first = checked(name, config)
        if name == "cliff-walking":  # its prompt names the actions, so that words of it are moves
            assert any(len(set(replies)) > 2 for _, replies, _ in first.plays)


def checked(name: str, config: str) -> contract.Observations:
    """Return what a process saw of an environment that keeps its contract."""
    first, second = (contract.observe_by_hash_seed(name, config, None, hash_seed) for hash_seed in (1, 2))
    assert [line for line in contract.failures(first, second) if line[1]] == []
    return first
