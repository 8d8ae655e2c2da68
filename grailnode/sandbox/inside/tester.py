"""Runs the tests. The names that the solution should define are functions that call the solver.

Standard input is JSON: reference, setup, tests. Arguments: the channels in and out, then the limits of `wire.limit`.
Standard output is one byte for each step: 'r' when both sides have started; 'c' when the solution compiles, else 's';
then '1' for each test that passes and '0' for each that fails.
"""

import ast
import builtins
import json
import os
import random
import sys
from collections.abc import Callable
from typing import Any

from grailnode.sandbox.inside import wire


def main() -> None:
    """Run all tests, until the solver ends."""
    answers, calls, *limits = map(int, sys.argv[1:])
    wire.limit(*limits)
    with os.fdopen(0, "rb") as file:
        reference, setup, tests = json.load(file)
    random.seed(0)
    try:
        _expect(answers, wire.HELLO)
        os.write(1, b"r")
        kind, _ = wire.receive(answers)
        os.write(1, kind if kind in (wire.COMPILED, wire.COMPILE_ERROR) else wire.COMPILE_ERROR)
        _expect(answers, wire.LOADED)
        names: dict[str, Any] = {"__name__": "tests"}
        _prepare(names, reference, setup, lambda name: _RemoteFunction(name, calls, answers))
        for test in tests:
            os.write(1, b"1" if _passes(test, names) else b"0")
    except wire.GoneError:
        return


def _expect(answers: int, kind: bytes) -> None:
    if wire.receive(answers)[0] != kind:
        raise wire.GoneError


class _RemoteFunction:
    """A function of the solution, as the tests see it: it calls the solver."""

    def __init__(self, name: str, calls: int, answers: int) -> None:
        self._name = name
        self._calls = calls
        self._answers = answers

    def __call__(self, *arguments: object, **keywords: object) -> Any:
        wire.send(self._calls, wire.CALL, [self._name, list(arguments), keywords])
        kind, value = wire.receive(self._answers)
        if kind == wire.VALUE:
            return value
        error = getattr(builtins, value, None) if kind == wire.RAISED and isinstance(value, str) else None
        if not isinstance(error, type) or not issubclass(error, BaseException):
            raise wire.GoneError
        # most UnicodeErrors need arguments, and what is not an Exception would end this process
        raise error if issubclass(error, Exception) and not issubclass(error, UnicodeError) else RuntimeError


def _prepare(names: dict[str, Any], reference: str, setup: str, remote: Callable[[str], _RemoteFunction]) -> None:
    """Define the names that the tests use.

    They are the imports of the reference, its other top-level names as calls to the solver, and what the setup defines.
    """
    for statement in ast.parse(reference).body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([statement], []), "reference", "exec"), names)  # noqa: S102
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
            names[statement.name] = remote(statement.name)
        elif isinstance(statement, ast.Assign):
            names |= {target.id: remote(target.id) for target in statement.targets if isinstance(target, ast.Name)}
    exec(compile(setup, "setup", "exec"), names)  # noqa: S102


def _passes(test: str, names: dict[str, Any]) -> bool:
    try:
        exec(compile(test, "test", "exec"), names)  # noqa: S102
    except Exception:  # noqa: BLE001, a test fails with any exception
        return False
    return True
