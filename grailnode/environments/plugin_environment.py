"""Makes an `Environment` of a plug-in's process in the sandbox. Nothing that comes from there is trusted."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from grailnode.environments.wheels import PluginError
from grailnode.sandbox import BubblewrapSandbox
from grailnode.sandbox.plugin_sandbox import CallError, PluginLimits, PluginSandbox, Session
from protocol import limits
from protocol.environments import Problem
from protocol.environments.base import SandboxError

_MAX_HELD_OUT: Final = 1 << 31
_MAX_WEIGHT: Final = 1 << 31  # of a level
_STRICT_LIMITS: Final = PluginLimits(call_seconds=300.0, cpu_seconds=5)
"""Processor time, which other programs do not change; a sixth of the time that stops a node."""


class PluginEnvironment:
    """The environment of a plug-in, by the interface of the built-in ones.

    Its problems are objects of JSON: `prompt` (text), `reference` (any value), and optionally `stratum` (text). It has
    episodes if `turns`, the most turns of one, is more than 1, and levels if `levels` is not empty. Where the plug-in
    gives no reward or reply, the reward is 0 or, if it is strict, a CallError is raised.
    """

    def __init__(self, name: str, sandbox: PluginSandbox, *, strict: bool = False) -> None:
        self.name, self._sandbox = name, sandbox
        self._forgiven = () if strict else (CallError,)
        self.exact = sandbox.facts.get("exact") is True
        size = sandbox.facts.get("held_out_size")
        if size is not None and (type(size) is not int or not 0 < size < _MAX_HELD_OUT):
            raise PluginError(f"environment {name!r}: held_out_size is a positive integer, or None")
        self.held_out_size: int | None = size
        turns = sandbox.facts.get("turns")
        if type(turns) is not int or not 0 < turns <= limits.MAX_TURNS:
            raise PluginError(f"environment {name!r}: turns is an integer from 1 to {limits.MAX_TURNS}")
        self.turns: int = turns
        levels = sandbox.facts.get("levels")
        if not (isinstance(levels, dict) and all(level and _is_stratum(level) for level in levels)):
            raise PluginError(f"environment {name!r}: levels is an object whose names are those of strata")
        if not all(type(weight) is int and 0 < weight < _MAX_WEIGHT for weight in levels.values()):
            raise PluginError(f"environment {name!r}: the value of a level is a positive integer")
        self.levels: dict[str, int] = levels

    @classmethod
    def open(
        cls,
        base: BubblewrapSandbox,
        folders: Sequence[Path],
        name: str,
        config: bytes,
        hash_seed: int = 0,
        *,
        strict: bool = False,
    ) -> "PluginEnvironment":
        """Load the environment in a process of the sandbox."""
        limits = _STRICT_LIMITS if strict else PluginLimits()
        return cls(name, PluginSandbox(base, folders, name, config, limits, hash_seed), strict=strict)

    def problem(self, seed: bytes) -> Problem:
        return self._problem("problem", seed.hex())

    def held_out_problem(self, index: int) -> Problem:
        return self._problem("held_out_problem", index if self.held_out_size is None else index % self.held_out_size)

    def problem_of_level(self, level: str, seed: bytes) -> Problem:
        return self._problem("problem_of_level", level, seed.hex())

    def _problem(self, method: str, *arguments: str | int) -> Problem:
        argument = " ".join(map(str, arguments))
        try:
            value = self._sandbox.call(method, *arguments)
        except CallError as error:
            raise SandboxError(f"environment {self.name!r}: no {method} of {argument}: {error}") from error
        prompt = value.get("prompt") if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(prompt, str) or not _is_utf8(prompt):
            raise SandboxError(f"environment {self.name!r}: {method} of {argument} has no text as its prompt")
        stratum = value.get("stratum", "")
        return Problem(prompt, json.dumps(value), stratum if _is_stratum(stratum) else "")

    def reward(self, problem: Problem, completion: str) -> float:
        if self.turns > 1:
            episode = self.begin(problem, bytes(32))
            episode.step(completion)
            return episode.reward()
        with suppress(*self._forgiven):
            return _checked(self._sandbox.call("reward", json.loads(problem.reference), completion))
        return 0.0

    def begin(self, problem: Problem, seed: bytes) -> "PluginEpisode":
        return PluginEpisode(self._sandbox, problem, seed, self._forgiven)

    def close(self) -> None:
        self._sandbox.close()


class PluginEpisode:
    """An episode, in a process of its own from the first turn until its reward is known or it ends by an error.

    A turn for which the plug-in raises an exception, ends its process, or returns neither a text nor None is the last
    one, and the reward is then 0.
    """

    def __init__(
        self, sandbox: PluginSandbox, problem: Problem, seed: bytes, forgiven: tuple[type[CallError], ...]
    ) -> None:
        self._sandbox, self._forgiven = sandbox, forgiven
        self._beginning = json.loads(problem.reference), seed.hex()
        self._session: Session | None = None
        self._reward: float | None = None

    def step(self, text: str) -> str | None:
        with suppress(*self._forgiven):
            reply = self._call("step", text)
            if reply is None or isinstance(reply, str):
                return reply
            self._close()
            raise CallError("a reply that is neither a text nor None")
        return None

    def reward(self) -> float:
        if self._reward is None:
            try:
                with suppress(*self._forgiven):
                    self._reward = _checked(self._call("reward"))
            finally:
                self._close()
        return self._reward or 0.0

    def _call(self, method: str, *arguments: object) -> Any:
        if self._session is None:
            self._session, _ = self._sandbox.start("begin", *self._beginning)
        return self._session.call(method, *arguments)

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()


def _checked(reward: object) -> float:
    if not (type(reward) is float or type(reward) is int) or not 0.0 <= reward <= 1.0:
        raise CallError(f"a reward of {reward}, not a number in [0, 1]")
    return float(reward)


def _is_utf8(text: str) -> bool:
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False


def _is_stratum(value: object) -> bool:
    """Return whether a value names a stratum, by the rule of data files (docs/spec/environments.md)."""
    return isinstance(value, str) and len(value) <= limits.MAX_STRATUM_CHARS and value.isascii() and value.isprintable()
