"""Environments of plug-ins: their problems and rewards, and what hostile code in them gains."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from grailnode.environments.plugin_environment import PluginEnvironment
from grailnode.environments.wheels import PluginError
from grailnode.sandbox import BubblewrapSandbox
from grailnode.sandbox.plugin_sandbox import PluginLimits, PluginSandbox
from protocol.environments.base import Problem, SandboxError, SandboxLimitError
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


def test_a_stratum_is_short_and_printable(hostile: PluginEnvironment) -> None:
    assert hostile.held_out_problem(0).stratum == ""


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


def test_the_process_is_started_again_when_it_has_ended(base: BubblewrapSandbox, site: Path) -> None:
    sandbox = PluginSandbox(base, [site], "hostile", b"{}")
    first = sandbox.call("held_out_problem", 0)
    host = sandbox._host
    assert host is not None
    host._process.kill()
    host._process.wait()
    assert sandbox.call("held_out_problem", 0) == first
    sandbox.close()


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
    ],
)
def test_what_does_not_load_is_an_error_in_one_line(
    base: BubblewrapSandbox, tmp_path: Path, source: str, reason: str
) -> None:
    folder = install_module("broken", source, tmp_path)
    with pytest.raises((SandboxError, PluginError), match=reason) as error_info:
        PluginEnvironment.open(base, [folder], "broken", b"{}")
    assert "\n" not in str(error_info.value)
