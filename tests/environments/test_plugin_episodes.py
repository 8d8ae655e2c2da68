"""Episodes of plug-ins: a process for each, what ends it, and what an ended one still holds."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from grailnode.environments.plugin_environment import PluginEnvironment
from grailnode.sandbox.plugin_sandbox import PluginLimits, PluginSandbox, _Host
from protocol.environments.base import Problem, SandboxLimitError
from tests.support.builders.plugins import install_module
from tests.support.builders.tasks import open_sandbox

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
    """Return the open descriptors of this process."""
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
