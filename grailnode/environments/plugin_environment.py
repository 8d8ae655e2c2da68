"""Makes an `Environment` of a plug-in's process in the sandbox. Nothing that comes from there is trusted."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from grailnode.environments.wheels import PluginError
from grailnode.sandbox import BubblewrapSandbox
from grailnode.sandbox.plugin_sandbox import CallError, PluginSandbox
from protocol import limits
from protocol.environments import Problem
from protocol.environments.base import SandboxError

_MAX_HELD_OUT: Final = 1 << 31


class PluginEnvironment:
    """The environment of a plug-in, by the interface of the built-in ones.

    Its problems are objects of JSON: `prompt` (text), `reference` (any value), and optionally `stratum` (text).
    """

    def __init__(self, name: str, sandbox: PluginSandbox) -> None:
        self.name, self._sandbox = name, sandbox
        self.exact = sandbox.facts.get("exact") is True
        size = sandbox.facts.get("held_out_size")
        if size is not None and (type(size) is not int or not 0 < size < _MAX_HELD_OUT):
            raise PluginError(f"environment {name!r}: held_out_size is a positive integer, or None")
        self.held_out_size: int | None = size

    @classmethod
    def open(
        cls, base: BubblewrapSandbox, folders: Sequence[Path], name: str, config: bytes, hash_seed: int = 0
    ) -> "PluginEnvironment":
        """Load the environment in a process of the sandbox.

        Raises:
            SandboxError: it does not load.
        """
        return cls(name, PluginSandbox(base, folders, name, config, hash_seed=hash_seed))

    def problem(self, seed: bytes) -> Problem:
        return self._problem("problem", seed.hex())

    def held_out_problem(self, index: int) -> Problem:
        return self._problem("held_out_problem", index if self.held_out_size is None else index % self.held_out_size)

    def _problem(self, method: str, argument: str | int) -> Problem:
        try:
            value = self._sandbox.call(method, argument)
        except CallError as error:
            raise SandboxError(f"environment {self.name!r}: no {method} of {argument}: {error}") from error
        prompt = value.get("prompt") if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(prompt, str) or not _is_utf8(prompt):
            raise SandboxError(f"environment {self.name!r}: {method} of {argument} has no text as its prompt")
        stratum = value.get("stratum", "")
        return Problem(prompt, json.dumps(value), stratum if _is_stratum(stratum) else "")

    def reward(self, problem: Problem, completion: str) -> float:
        try:
            return self.judge(problem, completion)
        except CallError:
            return 0.0

    def judge(self, problem: Problem, completion: str) -> float:
        """Return the reward of a completion; CallError where the plug-in gives none in [0, 1]."""
        value = self._sandbox.call("reward", json.loads(problem.reference), completion)
        if type(value) not in (int, float) or not 0.0 <= value <= 1.0:
            raise CallError(f"a reward of {value}, not a number in [0, 1]")
        return float(value)

    def close(self) -> None:
        """End the environment's processes."""
        self._sandbox.close()


def _is_utf8(text: str) -> bool:
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False


def _is_stratum(value: object) -> bool:
    """Return whether a value names a stratum, by the rule of data files (docs/spec/environments.md)."""
    return isinstance(value, str) and len(value) <= limits.MAX_STRATUM_CHARS and value.isascii() and value.isprintable()
