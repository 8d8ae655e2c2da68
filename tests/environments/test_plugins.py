"""Environments of plug-ins: their problems and rewards, what hostile code in them gains, and their contract."""

import importlib.metadata
import io
import os
import resource
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grailnode.environments import registry
from grailnode.environments.plugin_environment import PluginEnvironment
from grailnode.environments.wheels import PluginError, Wheel, pack, unpack
from grailnode.sandbox import BubblewrapSandbox
from grailnode.sandbox.plugin_sandbox import PluginLimits, PluginSandbox
from protocol.digest import content_digest
from protocol.environments.base import Problem, SandboxError, SandboxLimitError
from protocol.environments.record import CodeRef, EnvironmentSpec
from protocol.errors import LimitError, MalformedError
from tests.support.builders.plugins import files_of, files_of_page, install
from tests.support.builders.samples import environment
from tests.support.builders.tasks import OWN, open_sandbox
from tests.support.processes.command_line import fail, run_command, succeed

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
    return install(files_of("hostile", HOSTILE), tmp_path_factory.mktemp("hostile"))


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
    folder = install(files_of("bounded", BOUNDED), tmp_path)
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
    folder = install(files_of("broken", source), tmp_path)
    with pytest.raises((SandboxError, PluginError), match=reason) as error_info:
        PluginEnvironment.open(base, [folder], "broken", b"{}")
    assert "\n" not in str(error_info.value)


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
def games(base: BubblewrapSandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PluginEnvironment]:
    """Return an environment of episodes with a short limit of time."""
    folder = install(files_of("games", EPISODES), tmp_path_factory.mktemp("games"))
    sandbox = PluginSandbox(base, [folder], "games", b"{}", PluginLimits(call_seconds=2.0))
    yield PluginEnvironment("games", sandbox)
    sandbox.close()


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


def test_a_problem_that_does_not_begin_has_no_reward(games: PluginEnvironment) -> None:
    episode = games.begin(Problem("a", '{"prompt": "a", "reference": ""}'), bytes(32))
    assert [episode.step("b"), episode.reward()] == [None, 0.0]


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
    host = games._sandbox._host
    assert host is not None
    (inner,) = Path(f"/proc/{host._process.pid}/task/{host._process.pid}/children").read_text().split()
    forks = Path(f"/proc/{inner}/task/{inner}/children")
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
    """Return the open descriptors of this process."""
    return {int(path.name) for path in Path("/proc/self/fd").iterdir() if path.exists()}


def test_ended_episodes_hold_nothing_though_their_objects_are_kept(games: PluginEnvironment) -> None:
    problem = games.problem(bytes(32))
    host = games._sandbox._host
    assert host is not None
    (inner,) = Path(f"/proc/{host._process.pid}/task/{host._process.pid}/children").read_text().split()
    forks = Path(f"/proc/{inner}/task/{inner}/children")

    def held() -> tuple[int, int]:
        return len(descriptors()), len(forks.read_text().split())

    before, kept = held(), []
    for number in range(300):
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


def archive(*files: tuple[str, bytes], wheel: bytes = b"Tag: py3-none-any\n") -> Wheel:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in (*files, ("a-1.dist-info/WHEEL", wheel)):
            file.writestr(name, data)
    return wheel_of(stream.getvalue())


def wheel_of(data: bytes) -> Wheel:
    return Wheel(CodeRef(distribution="a", version="1", digest=content_digest(data), size=len(data)), data)


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "a/../../x",
        "/x",
        "a//x",
        "a\\..\\x",
        "./x",
        "C:x",
        "a" * 201,
        "é" * 101,
        "a/" + "b" * 300,
        "a/" * 16 + "b",
        "/".join(["c" * 150] * 8),
    ],
)
def test_a_wheel_that_would_write_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(MalformedError, match="a wheel with a file"):
        unpack(archive((name, b"x")), tmp_path / "wheels")
    assert [path.name for path in tmp_path.rglob("*")] == ["wheels"]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_wheels_that_contradict_themselves_or_are_none_are_refused(tmp_path: Path) -> None:
    damaged = bytearray(archive(("a.py", os.urandom(1000))).data)
    damaged[100] ^= 1
    for wheel in (
        *(archive(("a", b"1"), ("a", b"2")), archive(("a", b"1"), ("a/b", b"2")), wheel_of(b""), wheel_of(b"PK")),
        *(wheel_of(bytes(damaged)), archive(("b-1.dist-info/WHEEL", b"Tag: py3-none-any"))),
    ):
        with pytest.raises(MalformedError):
            unpack(wheel, tmp_path)
    with pytest.raises(LimitError, match="more than 536870912 bytes"):
        unpack(archive(*((f"{number}", bytes(128 << 20)) for number in range(5))), tmp_path)
    with pytest.raises(PluginError, match="for win_amd64, and this machine is linux"):
        unpack(archive(wheel=b"Tag: cp311-cp311-win_amd64\n"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_a_wheel_is_a_file(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        info = zipfile.ZipInfo("link")
        info.external_attr = 0o120777 << 16
        file.writestr(info, "/etc/passwd")
        file.writestr("a-1.dist-info/WHEEL", "Tag: py3-none-any")
    folder = unpack(wheel_of(stream.getvalue()), tmp_path)
    assert not (folder / "link").is_symlink()
    assert (folder / "link").read_text() == "/etc/passwd"


def test_an_installed_distribution_gives_the_same_wheel_twice(site: Path, tmp_path: Path) -> None:
    (distribution,) = importlib.metadata.distributions(path=[str(site)])
    wheel = pack(distribution)
    assert pack(distribution) == wheel
    folder = unpack(wheel, tmp_path)
    assert (folder / "hostile.py").read_text() == HOSTILE
    assert unpack(replace(wheel, data=b""), tmp_path) == folder  # which is there already


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "chess"}, "unknown environment 'chess'; there are: addition, "),
        (
            {},
            r"of this run is that of grailnode 0\.1\.0 \(fbc6c1d4c3b6db8f\), and here it is that of grailnode",
        ),
    ],
)
def test_other_code_is_named_in_one_line_with_this_programs(change: dict[str, str], words: str) -> None:
    with pytest.raises(PluginError, match=words) as error_info:
        registry.check_code(environment(**change))
    assert "\n" not in str(error_info.value)


@pytest.mark.parametrize("name", ["addition", "math", f"code-{OWN}"])
def test_this_programs_own_code_is_accepted_if_the_record_says_what_it_is(name: str) -> None:
    spec = registry.built_in_spec(name)
    registry.check_code(spec)
    with pytest.raises(PluginError, match="contradicts its code"):
        registry.check_code(spec.model_copy(update={"exact": not spec.exact}))


def test_the_digest_of_modules_covers_what_they_import() -> None:
    digests = {name: registry.built_in_spec(name).code[0].digest for name in ("addition", "sat", "math", "code-3.11")}
    assert len(set(digests.values())) == 4
    assert registry.built_in_spec("code-3.12").code[0].digest == digests["code-3.11"]


CODE = CodeRef(distribution="a", version="1", digest=bytes(32), size=1)


@pytest.mark.parametrize(
    "change",
    [
        *({"python": ""}, {"python": "2.7"}, {"name": ""}, {"name": "a/b"}, {"code": ()}, {"code": (CODE, CODE)}),
        *({"config": b'{"b":1,"a":1}'}, {"config": b"{ }"}, {"config": b"[]"}, {"config": b'{"a":NaN}'}),
        *({"config": b"{"}, {"config": '{"a":"é"}'.encode()}, {"config": b'{"a":1,"a":1}'}, {"config": b"1" * 70_000}),
        {"code": (CODE, CodeRef(distribution="b", version="1", digest=bytes(32), size=0))},
    ],
    ids=str,
)
def test_a_record_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "name": "a",
        "code": (CODE,),
        "python": "3.11",
        "config": b'{"a":[1,"\\u00e9"]}',
        "exact": True,
    }
    assert EnvironmentSpec.from_bytes(EnvironmentSpec(**fields).to_bytes()).is_plugin
    with pytest.raises((ValueError, MalformedError)):
        EnvironmentSpec(**(fields | change))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    def install_here(files: dict[str, str]) -> None:
        monkeypatch.syspath_prepend(install(files, tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    return install_here


def test_the_guides_task_keeps_its_contract(installed: Callable[[dict[str, str]], None], base: object) -> None:
    files = files_of_page()
    assert max(len(files[name].strip().splitlines()) for name in ("doubled_digits.py", "higher_lower.py")) <= 30
    installed(files)
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


def test_a_broken_contract_is_named_line_by_line(installed: Callable[[dict[str, str]], None], base: object) -> None:
    installed(files_of("broken-task", BROKEN))
    result = run_command("environments", "check", "broken-task")
    assert result.returncode == 1
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
    for part in ("200 seeds", "200 held-out", "an empty answer gave CallError: ZeroDivisionError", "1.0 for 'zzz'"):
        assert sum(part in line for line in failed) == 1
    assert result.stderr == "Error: environment 'broken-task' does not keep its contract\n"


def test_a_built_in_environment_keeps_the_contract() -> None:
    assert "FAILED" not in succeed("environments", "check", "addition")
    assert "unknown environment 'chess'" in fail("environments", "check", "chess")


@pytest.mark.parametrize(("data_set", "reader"), [("gsm8k", "math"), ("mbpp", f"code-{OWN}")])
def test_the_name_of_a_data_set_gives_the_environment_that_reads_its_form(data_set: str, reader: str) -> None:
    line = f"problems in this form are read by --environment {reader} --data FILE"
    assert f"environment '{data_set}': {line}" in fail("init", "run", "--environment", data_set)
    assert f"environment '{data_set}': {line}" in fail("environments", "try", data_set)
    assert f"{data_set:<16} {line}" in succeed("environments")
