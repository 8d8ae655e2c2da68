"""The environment `verifiers`: a taskset of verifiers 0.4 whose tasks and rewards are functions of texts.

Its configuration is that of the taskset, as verifiers reads it: `{"id": DISTRIBUTION, ...}`. The distribution's wheels
come along in a run, and those of verifiers do not: it requires 97 distributions of 316 MB, with clients of services.
This module takes the place of `verifiers.v1`, with what such a taskset uses.

What needs a judge, tools, a container, a network or a clock does not load, and the error names it.
"""

import datetime
import hashlib
import importlib
import inspect
import itertools
import logging
import sys
import time
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

HELD_OUT = 26  # of 256 tasks, by the first byte of the SHA-256 of their prompt
MOST_TASKS = 100_000
_NEEDS = {"judge": "a judge", "criterion": "a judge", "tool": "tools", "mcp": "tools", "client": "a network"}
_HOOKS = {**dict.fromkeys(("setup", "finalize", "stage_verifier"), "a container"), "plugged_judges": "a judge"}
_CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "gmtime", "localtime")


class RefusedError(Exception):
    """The taskset needs what a validator does not have."""


class Message(BaseModel):
    role: str
    content: str = ""


class SystemMessage(Message):
    role: str = "system"


class UserMessage(Message):
    role: str = "user"


class AssistantMessage(Message):
    role: str = "assistant"


class TaskData(BaseModel):
    model_config = ConfigDict(frozen=True)

    idx: int | None = None
    id: str | None = None
    name: str | None = None
    description: str | None = None
    prompt: str | list[Message] | None = None
    system_prompt: str | None = None
    image: str | None = None
    workdir: str | None = None

    @property
    def prompt_text(self) -> str:
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n\n".join(message.content for message in self.prompt or () if message.content)


class State(BaseModel):
    pass


class TaskConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TasksetConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: str = ""
    task: TaskConfig = TaskConfig()


class _Parameters:
    """Takes types in brackets, as in `Task[Data, State, Config]`."""

    parameters: ClassVar[tuple[type, ...]] = ()

    def __class_getitem__(cls, item: Any) -> type:
        return type(cls.__name__, (cls,), {"parameters": item if isinstance(item, tuple) else (item,)})

    @classmethod
    def parameter(cls, base: type) -> Any:
        return next((part for part in cls.parameters if isinstance(part, type) and issubclass(part, base)), base)


class Task(_Parameters):
    NEEDS_CONTAINER = False

    def __init__(self, data: Any, config: Any = None) -> None:
        self.data, self.config = data, self.parameter(TaskConfig)() if config is None else config


class Taskset(_Parameters):
    INFINITE = False

    def __init__(self, config: Any) -> None:
        self.config = config

    def load(self) -> Iterable[Any]:
        raise NotImplementedError


class Trace:
    """A rollout of one reply."""

    num_turns, is_truncated, tool_messages = 1, False, ()

    def __init__(self, task: Task, reply: str) -> None:
        self.task, self.last_reply = task, reply.strip()
        self.info: dict[str, object] = {}
        self.assistant_messages = [AssistantMessage(content=reply)]
        self.last_message = self.assistant_messages[0]
        self.messages = [UserMessage(content=task.data.prompt_text), self.last_message]


def _marker(kind: str) -> Callable[..., Any]:
    def mark(function: Any = None, weight: float = 1.0, priority: int = 0) -> Any:
        if function is None:
            return lambda function: mark(function, weight, priority)
        setattr(function, kind, True)
        function._vf_weight = weight
        return function

    return mark


reward, metric, stop = _marker("reward"), _marker("metric"), _marker("stop")


class V1(types.ModuleType):
    """`verifiers.v1`, which names what it lacks."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        needs = (need for part, need in _NEEDS.items() if part in name.lower())
        need = next(needs, "verifiers, its agents or containers")
        raise RefusedError(f"verifiers.v1.{name}: the taskset needs {need}")


class Verifiers:
    """The tasks of a taskset. A problem's reference is the place of its task."""

    exact = True

    def __init__(self, config: dict[str, Any]) -> None:
        if not isinstance(config.get("id"), str):
            raise ValueError('the configuration names no taskset, as in {"id": "reverse-text"}')
        kind = _taskset(config["id"].replace("-", "_").lower())
        _forbid_clocks()
        if kind.INFINITE:
            raise RefusedError("the taskset has no end")
        taskset = kind(kind.parameter(TasksetConfig)(**config))
        self._tasks = list(itertools.islice(taskset.load(), MOST_TASKS))
        sides: tuple[list[int], list[int]] = [], []
        for place, task in enumerate(self._tasks):
            _check(task, taskset)
            digest = hashlib.sha256(_prompt(task).encode()).digest()
            sides[digest[0] < HELD_OUT].append(place)
        self._training, self._held_out = sides
        if not self._training or not self._held_out:
            raise RefusedError(f"{len(self._tasks)} tasks are too few to hold some of them out")
        self.held_out_size = len(self._held_out)
        for completion in ("", "zzz"):
            self._score(self._tasks[0], completion)

    def problem(self, seed: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(seed).digest()
        return self._problem(self._training[int.from_bytes(digest[:8], "big") % len(self._training)])

    def held_out_problem(self, index: int) -> dict[str, Any]:
        return self._problem(self._held_out[index % len(self._held_out)])

    def _problem(self, place: int) -> dict[str, Any]:
        return {"prompt": _prompt(self._tasks[place]), "reference": place}

    def reward(self, problem: dict[str, Any], completion: str) -> float:
        """Return the weighted sum of the task's rewards, cut to [0, 1]."""
        return min(1.0, max(0.0, self._score(self._tasks[problem["reference"]], completion)))

    def _score(self, task: Task, completion: str) -> float:
        available = {"task": task.data, "trace": Trace(task, completion)}
        total = 0.0
        for function in _rewards(task):
            names = inspect.signature(function).parameters.keys() & available.keys()
            result = _result(function(**{name: available[name] for name in names}))
            scores = result.values() if isinstance(result, Mapping) else [result]
            total += function._vf_weight * sum(map(float, scores))
        return total


def _taskset(name: str) -> type[Taskset]:
    """Return the one taskset that a module exports, after this module has taken the place of `verifiers.v1`."""
    v1 = V1("verifiers.v1")
    offered = {name: value for name, value in globals().items() if isinstance(value, type)}
    vars(v1).update(offered, reward=reward, metric=metric, stop=stop)
    package = types.ModuleType("verifiers")
    vars(package)["v1"] = v1
    sys.modules |= {"verifiers": package, "verifiers.v1": v1}
    module = importlib.import_module(name)
    exported = [getattr(module, name) for name in getattr(module, "__all__", ())]
    kinds = [kind for kind in exported if isinstance(kind, type) and issubclass(kind, Taskset)]
    if len(kinds) != 1:
        raise ValueError(f"{name}: its __all__ has {len(kinds)} tasksets, not one")
    return kinds[0]


def _rewards(task: Task) -> list[Any]:
    names = {name for kind in type(task).__mro__ for name in vars(kind)}
    return [function for name in sorted(names) if getattr(function := getattr(task, name), "reward", None) is True]


def _result(reward: Any) -> Any:
    """Return the result of a coroutine that waits for nothing."""
    try:
        reward.send(None)
    except StopIteration as end:
        return end.value
    raise RefusedError("a reward waits for something outside its process: the taskset needs a network or a container")


def _prompt(task: Task) -> str:
    return "\n\n".join(filter(None, (task.data.system_prompt, task.data.prompt_text)))


def _check(task: Task, taskset: Taskset) -> None:
    """Refuse a task that needs more than texts."""
    if task.NEEDS_CONTAINER or task.data.image or task.data.workdir:
        raise RefusedError("the taskset needs a container")
    for name, need in _HOOKS.items():
        if hasattr(task, name):
            raise RefusedError(f"{type(task).__name__}.{name}: the taskset needs {need}")
    if hasattr(task, "toolsets") or hasattr(taskset, "toolsets"):
        raise RefusedError("the taskset needs tools")
    if not _prompt(task) or any(
        part.role == "assistant" for part in task.data.prompt or () if isinstance(part, Message)
    ):
        raise RefusedError("a prompt is empty or a conversation")
    if not _rewards(task):
        raise RefusedError("a task has no reward of its own: the taskset needs a judge")
    for function in _rewards(task):
        runtime = inspect.signature(function).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            raise RefusedError(f"reward {function.__name__}: the taskset needs a container")


def _forbid_clocks() -> None:
    """Let what reads a clock fail from here on. Log records have the time, so there are none."""

    def refuse(*_: object, **__: object) -> Any:
        raise RefusedError("the taskset needs a clock")

    logging.disable()
    for name in _CLOCKS:
        setattr(time, name, refuse)
    readers = dict.fromkeys(("now", "utcnow", "today"), refuse)
    for kind in (datetime.datetime, datetime.date):
        setattr(datetime, kind.__name__, type(kind.__name__, (kind,), readers))
