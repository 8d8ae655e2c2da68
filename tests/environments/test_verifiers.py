"""The environment `verifiers`: a taskset whose rewards are functions of texts, and those that need more."""

import json
from collections.abc import Callable

import pytest

from grailnode.environments import registry
from grailnode.environments.plugin_environment import PluginEnvironment
from grailnode.environments.wheels import PluginError, unpack
from grailnode.sandbox import BubblewrapSandbox
from protocol.environments.base import SandboxError
from tests.support.builders.plugins import install_module
from tests.support.builders.tasks import open_sandbox

SOURCE = """
import time, urllib.request
from collections.abc import Iterable
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Config(vf.TasksetConfig):
    size: int = 150
    case: str = ""

class Reverse(vf.Task[Data, vf.State]):
    @vf.reward(weight=0.75)
    async def right(self, task: Data, trace: vf.Trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.25)
    async def shape(self, trace: vf.Trace) -> dict[str, float]:
        return {"length": float(len(trace.assistant_messages[-1].content) == len(self.data.answer)), "turns": 0.0}

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)

class Setup(Reverse):
    async def setup(self, trace, runtime): ...

class Runtime(Reverse):
    @vf.reward
    async def tests(self, trace, runtime): ...

class Clock(Reverse):
    @vf.reward
    async def right(self, trace): return time.time() % 1

class Waiting(Reverse):
    @vf.reward
    async def right(self, trace):
        class Reply:
            def __await__(self): yield
        await Reply()

class Tools(Reverse):
    @classmethod
    def toolsets(cls, config): return []

class Unjudged(vf.Task[Data]): ...

class Texts(vf.Taskset[Reverse, Config]):
    def load(self) -> Iterable[Reverse]:
        case = self.config.case
        if case == "network":
            urllib.request.urlopen("http://127.0.0.1:9")
        if case == "vf.Judge":
            vf.Judge
        task = globals()[case] if case[:1].isupper() else Reverse
        for number in range(self.config.size):
            image = "debian" if case == "image" else None
            yield task(Data(prompt=f"Reverse {number:04}.", answer=f"{number:04}"[::-1], image=image), self.config.task)

__all__ = ["Config", "Texts"]
"""

CONFIG = '{"id": "reverse-texts"}'


@pytest.fixture(scope="module")
def open_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., PluginEnvironment]:
    base: BubblewrapSandbox = open_sandbox()
    directory = tmp_path_factory.mktemp("verifiers")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(install_module("reverse-texts", SOURCE, directory, ("verifiers>=0.4",)))
        plugin = registry.open_plugin("verifiers", CONFIG, directory / "wheels")
        plugin.environment.close()
    names = [wheel.ref.distribution for wheel in plugin.wheels]
    assert {"grailnode-verifiers", "pydantic", "reverse-texts"} < set(names)
    assert not {"grailnode", "torch", "verifiers"} & set(names)
    folders = [unpack(wheel, directory / "wheels") for wheel in plugin.wheels]
    own = folders[names.index("grailnode-verifiers")]
    modules = [file.relative_to(own).as_posix() for file in own.rglob("*.py")]
    assert modules == ["grailnode/environments/extras/verifiers.py"]

    def open_one(**options: object) -> PluginEnvironment:
        config = {"id": "reverse-texts", **options}
        return PluginEnvironment.open(base, folders, "verifiers", json.dumps(config).encode(), strict=True)

    return open_one


def test_a_taskset_gives_problems_and_the_weighted_sum_of_its_rewards(
    open_case: Callable[..., PluginEnvironment],
) -> None:
    environment = open_case(size=100)
    size = environment.held_out_size
    assert size is not None
    held_out = {environment.held_out_problem(index).prompt for index in range(size)}
    training = {environment.problem(bytes([number]) * 32).prompt for number in range(100)}
    assert 2 < len(held_out) == size < 30 < len(training)
    assert not held_out & training
    problem = environment.held_out_problem(0)
    answer = problem.prompt[-5:-1][::-1]
    rewards = [environment.reward(problem, text) for text in (answer, f" {answer}\n", "9999", "", "zzz")]
    assert rewards == [1.0, 0.75, 0.25, 0.0, 0.0]
    environment.close()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            CONFIG,
            "reverse-texts: environment 'verifiers' requires it, and it is not installed: pip install 'reverse-texts'",
        ),
        ('{"id": "a==1; os"}', "No module named 'a==1; os'"),
        ("{}", 'names no taskset, as in {"id": "reverse-text"}'),
    ],
)
def test_a_taskset_that_is_not_installed_or_named_is_refused_in_one_line(config: str, reason: str) -> None:
    open_sandbox()
    with pytest.raises((PluginError, SandboxError)) as error_info:
        registry.open_plugin("verifiers", config)
    assert reason in str(error_info.value)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        *(("Setup", "Setup.setup: the taskset needs a container"), ("image", "needs a container")),
        *(("Runtime", "reward tests: the taskset needs a container"), ("Clock", "needs a clock")),
        *(("Waiting", "waits for something outside"), ("Tools", "needs tools"), ("network", "URLError")),
        *(("Unjudged", "no reward of its own"), ("vf.Judge", "verifiers.v1.Judge: the taskset needs a judge")),
    ],
)
def test_what_needs_more_than_texts_is_refused_with_the_reason(
    open_case: Callable[..., PluginEnvironment], case: str, reason: str
) -> None:
    with pytest.raises(SandboxError, match=f"does not load: .*{reason}"):
        open_case(case=case)
