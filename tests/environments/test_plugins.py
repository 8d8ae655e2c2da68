"""Environments of plug-ins: their problems, rewards and episodes, and what hostile code in them gains."""

import platform
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from grailnode.environments.plugin_environment import PluginEnvironment
from grailnode.environments.wheels import PluginError
from grailnode.sandbox import BubblewrapSandbox
from grailnode.sandbox.plugin_sandbox import PluginLimits, PluginSandbox, _Host
from protocol.environments.base import Problem, SandboxError, SandboxLimitError
from protocol.environments.mixture import Strata
from tests.support.builders.plugins import install_module
from tests.support.builders.tasks import open_sandbox

HOSTILE = """
import os, random, sys
COUNT = []
class Task:
    exact = True
    held_out_size = None
    def __init__(self, config):
        self.config = config
    def problem(self, seed):
        COUNT.append(seed)
        return {"prompt": f"{seed.hex()} {random.random()} {len(COUNT)} {hash('a')}", "reference": self.config}
    def held_out_problem(self, index):
        return [{"prompt": "a", "reference": None, "stratum": "s" * index}, {"prompt": ""}, "a", {"prompt": "\\ud800"},
                {"prompt": "b", "reference": object()}, {"prompt": "c" * (1 << 20)}, 1 / (index - 6)][index]
    def reward(self, problem, completion):
        return eval(completion)
"""


@pytest.fixture(scope="module")
def base() -> BubblewrapSandbox:
    return open_sandbox()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_module("hostile", HOSTILE, tmp_path_factory.mktemp("hostile"))


@pytest.fixture(scope="module")
def hostile(base: BubblewrapSandbox, site: Path) -> Iterator[PluginEnvironment]:
    environment = PluginEnvironment.open(base, [site], "hostile", b'{"a":[1]}')
    yield environment
    environment.close()


@pytest.fixture(scope="module")
def short(base: BubblewrapSandbox, site: Path) -> Iterator[PluginEnvironment]:
    """Return the same environment with a short limit of time."""
    sandbox = PluginSandbox(base, [site], "hostile", b"{}", PluginLimits(call_seconds=2.0))
    yield PluginEnvironment("hostile", sandbox)
    sandbox.close()


PROBLEM = Problem("a", '{"prompt": "a", "reference": 4}')


def test_every_problem_comes_from_a_fresh_process(hostile: PluginEnvironment) -> None:
    assert hostile.held_out_problem(0).stratum == ""
    problems = [hostile.problem(bytes([number]) * 32) for number in (1, 2, 1)]
    assert problems[0] == problems[2]
    texts = [problem.prompt.split(" ", 1)[1] for problem in problems]
    assert len(set(texts)) == 1  # random, the module's variable and hashes are as at the start
    assert problems[0].reference.endswith('"reference": {"a": [1]}}')


@pytest.mark.parametrize("index", range(1, 7))
def test_what_is_no_problem_is_an_error_in_one_line(hostile: PluginEnvironment, index: int) -> None:
    with pytest.raises(SandboxError, match=r"^environment 'hostile': .*held_out_problem of \d") as error_info:
        hostile.held_out_problem(index)
    assert "\n" not in str(error_info.value)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        *(("1", 1.0), ("0.25", 0.25), ("True", 1.0), ("problem['reference'] / 8", 0.5), ("len('☃')", 1.0)),
        *(("2", 0.0), ("-1e-9", 0.0), ("float('nan')", 0.0), ("float('inf')", 0.0), ("'1'", 0.0), ("None", 0.0)),
        *(("1/0", 0.0), ("", 0.0), ("(" * 10_000, 0.0), ("sys.exit()", 0.0), ("os._exit(0)", 0.0), ("10**400", 0.0)),
        ("[0] * (1 << 20)", 0.0),
    ],
)
def test_a_reward_is_a_number_between_zero_and_one_or_else_zero(
    hostile: PluginEnvironment, completion: str, reward: float
) -> None:
    assert hostile.reward(PROBLEM, completion) == reward


GAINS = {
    "a process": "os.fork() and 1",
    "a program": "os.system('true') == 0",
    "the process that forks": "os.kill(os.getppid(), 9) or 1",
    "all processes": "os.kill(-1, 9) or 1",
    "a signal by a pipe": "__import__('fcntl').fcntl(os.pipe()[0], 8, os.getppid()) == 0",
    "a limit of another process": "bool(__import__('resource').prlimit(os.getppid(), 0))",
    "the schedule of another process": "os.sched_setscheduler(os.getppid(), os.SCHED_IDLE, os.sched_param(0)) or 1",
    "the disk time of another process": "__import__('ctypes').CDLL(None).syscall({}, 1, os.getppid(), 3 << 13) == 0"
    "".format(251 if platform.machine() == "x86_64" else 30),  # ioprio_set
    "a network": "bool(__import__('socket').socket())",
    "a file": "open('/tmp/x', 'w') and 1",
    "a file of this machine": "len(os.listdir('/etc')) > 0",
    "the control socket": "any(os.path.exists(f'/proc/self/fd/{n}') for n in range(9))",
    "a variable": "bool(set(os.environ) & {'HOME', 'PATH', 'USER'})",
}


@pytest.mark.parametrize("gain", GAINS)
def test_code_in_an_answer_gains_nothing_and_harms_nobody(short: PluginEnvironment, gain: str) -> None:
    assert short.reward(PROBLEM, GAINS[gain]) == 0.0
    assert short.reward(PROBLEM, "1") == 1.0


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("9**9**9**9", "took over 2 s"),
        ("[].append(bytearray(1 << 40))", "limit of memory"),
        ("__import__('ctypes').string_at(0)", "ended by signal 11"),
        ("os.closerange(3, 20) or list(iter(int, 1))", "ended by signal 9"),
    ],
)
def test_a_limit_decides_no_reward(short: PluginEnvironment, completion: str, reason: str) -> None:
    with pytest.raises(SandboxLimitError, match=reason):
        short.reward(PROBLEM, completion)
    assert short.reward(PROBLEM, "1") == 1.0


@pytest.mark.slow
def test_a_check_limits_processor_time_of_which_other_programs_take_none(base: BubblewrapSandbox, site: Path) -> None:
    environment = PluginEnvironment.open(base, [site], "hostile", b"{}", strict=True)
    with pytest.raises(SandboxLimitError, match="CPU time limit exceeded"):
        environment.reward(PROBLEM, "9**9**9**9")
    environment.close()


BOUNDED = """
import ctypes, platform, resource
class Task:
    exact = True
    held_out_size = None
    def __init__(self, config):
        new_user_space = 0x10000011  # CLONE_NEWUSER | SIGCHLD
        call = 56 if platform.machine() == "x86_64" else 220
        self.child = ctypes.CDLL(None).syscall(call, new_user_space, 0, 0, 0, 0)
        self.limits = [resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC)]
    def problem(self, seed):
        return {"prompt": f"{self.limits} {self.child}", "reference": ""}
    held_out_problem = problem
    def reward(self, problem, completion):
        return 1.0
"""


def test_no_module_of_a_wheel_comes_before_the_limits_and_no_name_space_is_made(
    base: BubblewrapSandbox, tmp_path: Path
) -> None:
    folder = install_module("bounded", BOUNDED, tmp_path)
    for name in ("random", "json", "ctypes"):
        (folder / f"{name}.py").write_text("raise SystemExit")
    environment = PluginEnvironment.open(base, [folder], "bounded", b"{}")
    assert environment.problem(bytes(16)).prompt == f"[{PluginLimits().memory_bytes}, 256] -1"
    environment.close()


@pytest.mark.parametrize("status", [9 << 99, -9, 70, 0xFFFF])
def test_a_plug_in_that_forges_how_its_processes_end_harms_no_node(
    status: int, base: BubblewrapSandbox, tmp_path: Path
) -> None:
    forger = HOSTILE.replace("self.config = config", f"os.waitpid = lambda *_: (0, {status})")
    environment = PluginEnvironment.open(base, [install_module("forger", forger, tmp_path)], "forger", b"{}")
    assert environment.reward(PROBLEM, "os._exit(0)") == 0.0
    environment.close()


def test_the_process_is_started_again_when_it_has_ended(base: BubblewrapSandbox, site: Path) -> None:
    sandbox = PluginSandbox(base, [site], "hostile", b"{}")
    first = sandbox.call("held_out_problem", 0)
    host = sandbox._host
    assert host is not None
    host._process.kill()
    host._process.wait()
    assert sandbox.call("held_out_problem", 0) == first
    sandbox.close()


LEVELED = """
class Task:
    exact, held_out_size, levels = True, None, {}
    def __init__(self, config):
        pass
    def problem(self, seed):
        return {{"prompt": str(seed[0]), "reference": 0}}
    def problem_of_level(self, level, seed):
        return {{"prompt": f"{{level}} {{seed[0]}}", "reference": 0}}
    held_out_problem = problem
"""


def test_a_stratum_of_a_plug_in_with_levels_asks_it_for_a_problem_of_this_level(
    base: BubblewrapSandbox, tmp_path: Path
) -> None:
    levels = {f"level {number:02} {'x' * 55}": number + 1 for number in range(64)}
    folder = install_module("leveled", LEVELED.format(levels), tmp_path)
    environment = PluginEnvironment.open(base, [folder], "leveled", b"{}")
    strata = Strata(environment)
    assert strata.weights == levels
    problem = strata.problem(list(levels)[7], bytes([9]) * 32)
    assert (problem.prompt, problem.stratum) == (f"level 07 {'x' * 55} 9", f"level 07 {'x' * 55}")
    environment.close()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("1/0", "ZeroDivisionError"),
        ("import os\nos._exit(0)", "its process ended"),
        ("class Task:\n    def __init__(self, config): raise ValueError('a\\nb\\x1b')", "ValueError: a$"),
        (
            "class Task:\n    exact = True\n    held_out_size = 0\n    def __init__(self, config): pass",
            "positive integer",
        ),
        *((LEVELED.format(levels), "levels is an object whose names") for levels in ("1", "{'': 1}", "{'a' * 65: 1}")),
        *((LEVELED.format(levels), "of a level is a positive") for levels in ("{'a': 0}", "{'a': 0.5}")),
        (LEVELED.format("[object()]"), "TypeError"),
        (LEVELED.format("dict.fromkeys(map(str, range(5000)), 1)"), "facts take [0-9]+ bytes, more than 16384"),
    ],
)
def test_what_does_not_load_is_an_error_in_one_line(
    base: BubblewrapSandbox, tmp_path: Path, source: str, reason: str
) -> None:
    folder = install_module("broken", source, tmp_path)
    with pytest.raises((SandboxError, PluginError), match=reason) as error_info:
        PluginEnvironment.open(base, [folder], "broken", b"{}")
    assert "\n" not in str(error_info.value)


# Episodes of plug-ins: a process for each, what ends it, and what an ended one still holds


EPISODES = """
import os, random, time
class Task:
    exact, held_out_size, turns = True, None, 4
    def __init__(self, config):
        self.stock = []
    def problem(self, seed):
        return {"prompt": "a", "reference": seed.hex()}
    held_out_problem = problem
    def begin(self, problem, seed):
        if not problem["reference"]:
            raise ValueError
        return Game(self, seed)
class Game:
    def __init__(self, task, seed):
        self.task, self.seed, self.texts, self.value = task, seed, [], 0.5
    def step(self, text):
        self.texts.append(text)
        self.task.stock.append(text)
        if text.startswith("!"):
            return eval(text[1:])
        return f"{self.seed.hex()[:4]} {random.random()} {self.texts} {len(self.task.stock)}"
    def reward(self):
        return self.value
"""


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PluginEnvironment]:
    """Return an environment of episodes with a short limit of time."""
    folder = install_module("games", EPISODES, tmp_path_factory.mktemp("games"))
    sandbox = PluginSandbox(open_sandbox(), [folder], "games", b"{}", PluginLimits(call_seconds=2.0))
    yield PluginEnvironment("games", sandbox)
    sandbox.close()


def processes(games: PluginEnvironment) -> tuple[_Host, Path]:
    """Return the process that forks, and the file that lists its forks."""
    host = games._sandbox._host
    assert host is not None
    (inner,) = Path(f"/proc/{host._process.pid}/task/{host._process.pid}/children").read_text().split()
    return host, Path(f"/proc/{inner}/task/{inner}/children")


def test_every_episode_has_a_process_of_its_own_from_its_first_turn_to_its_reward(games: PluginEnvironment) -> None:
    problem, texts = games.problem(bytes(32)), ("b", "c")
    episodes = [games.begin(problem, bytes([number]) * 32) for number in (1, 2, 1)]
    replies = [[episode.step(text) for episode in episodes] for text in texts]  # side by side
    for turn, (first, second, again) in enumerate(replies, 1):
        assert first == again and first is not None and first.endswith(f"{list(texts[:turn])} {turn}")
        assert second is not None and second.partition(" ")[0] == "0202" and second[5:] == first[5:]
    assert [episode.reward() for episode in episodes] == [0.5] * 3
    assert games.turns == 4 and games.reward(problem, "b") == 0.5


@pytest.mark.parametrize(
    "text", ["!1/0", "!1", "![]", "!os._exit(0)", "!'a' * (1 << 20)", "!object()", "!setattr(self, 'value', 2)"]
)
def test_what_is_no_reply_or_reward_ends_the_episode_without_a_reward(games: PluginEnvironment, text: str) -> None:
    episode = games.begin(games.problem(bytes(32)), bytes(32))
    assert episode.step("b")
    assert [episode.step(text), episode.reward()] == [None, 0.0]
    not_begun = games.begin(Problem("a", '{"prompt": "a", "reference": ""}'), bytes(32))
    assert [not_begun.step("b"), not_begun.reward()] == [None, 0.0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("!time.sleep(0.8)", "took over 2 s"),  # in all turns together
        ("![].append(bytearray(1 << 40))", "limit of memory"),
        ("!__import__('ctypes').string_at(0)", "ended by signal 11"),
    ],
)
def test_a_limit_decides_no_episode(games: PluginEnvironment, text: str, reason: str) -> None:
    episode = games.begin(games.problem(bytes(32)), bytes(32))
    with pytest.raises(SandboxLimitError, match=reason):
        for _ in range(4):
            episode.step(text)
    assert games.reward(games.problem(bytes(32)), "b") == 0.5


def test_an_episode_that_nobody_ends_ends_with_its_object_and_one_whose_host_ends_is_not_judged(
    games: PluginEnvironment,
) -> None:
    problem = games.problem(bytes(32))
    abandoned, lost = games.begin(problem, bytes(32)), games.begin(problem, bytes(32))
    assert abandoned.step("b") == lost.step("b")
    host, forks = processes(games)
    first, *_ = forks.read_text().split()
    del abandoned
    while first in forks.read_text().split():  # the process that forks takes a moment to read that it is to end it
        assert games.problem(bytes(32)) == problem
    host._process.kill()
    host._process.wait()
    with pytest.raises(SandboxLimitError, match="the process that forks has ended"):
        while True:  # the kernel takes a moment to end the forks
            lost.step("b")
    assert games.begin(problem, bytes(32)).step("b")


def descriptors() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/fd").iterdir() if path.exists()}


def test_ended_episodes_hold_nothing_though_their_objects_are_kept(games: PluginEnvironment) -> None:
    problem = games.problem(bytes(32))
    _, forks = processes(games)

    def held() -> tuple[int, int]:
        return len(descriptors()), len(forks.read_text().split())

    before, kept = held(), []
    for number in range(90):
        kept.append(episode := games.begin(problem, bytes(32)))
        failed = number % 3 == 1
        assert (episode.step("!1/0" if failed else "b") is None) == failed
        if not failed:
            assert [episode.reward(), episode.reward()] == [0.5, 0.5]
    assert games.problem(bytes(32)) == problem  # the process that forks may be a few messages behind
    assert all(now <= then + 3 for now, then in zip(held(), before, strict=True))


def test_too_few_descriptors_end_one_episode_and_not_those_that_are_open(games: PluginEnvironment) -> None:
    problem = games.problem(bytes(32))
    episode = games.begin(problem, bytes(32))
    assert episode.step("b")
    _, most = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    for free in range(4):
        held = descriptors()
        lowest = min(set(range(len(held) + 1)) - held)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free, most))
        try:
            with pytest.raises(SandboxLimitError, match="Too many open files"):
                games.begin(problem, bytes(32)).step("b")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert descriptors() == held
    assert episode.step("c") and episode.reward() == 0.5
