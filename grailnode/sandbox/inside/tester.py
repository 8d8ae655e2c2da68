"""Runs the tests, apart from the solution: the names that it should define stand for calls to the solver.

Standard input is JSON: reference, setup, tests. Arguments: the channels in and out, then the limits of `wire.limit`.
Standard
output, a byte each: 'r' both sides are up, 'c' or 's' the solution compiles or not, then '1' or '0' for every test.
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
    """Run all tests, as long as the solver lives."""
    answers, calls, *limits = map(int, sys.argv[1:])
    wire.limit(*limits)
    with os.fdopen(0, "rb") as file:
        reference, setup, tests = json.load(file)
    random.seed(0)
    try:
        _expect(answers, wire.HELLO)
        _say(b"r")
        compiled, _ = wire.receive(answers)
        _say(compiled if compiled in (wire.COMPILED, wire.REFUSED) else wire.REFUSED)
        _expect(answers, wire.LOADED)
        names: dict[str, Any] = {"__name__": "tests"}
        _prepare(names, reference, setup, lambda name: _Remote(name, calls, answers))
        for test in tests:
            _say(b"1" if _passes(test, names) else b"0")
    except wire.GoneError:
        return


def _say(what: bytes) -> None:
    os.write(1, what)


def _expect(answers: int, kind: bytes) -> None:
    if wire.receive(answers)[0] != kind:
        raise wire.GoneError


class _Remote:
    """A function of the solution's, as the tests see it."""

    def __init__(self, name: str, calls: int, answers: int) -> None:
        self._name = name
        self._calls = calls
        self._answers = answers

    def __call__(self, *arguments: object, **named: object) -> Any:
        wire.send(self._calls, wire.CALL, [self._name, list(arguments), named])
        kind, value = wire.receive(self._answers)
        if kind == wire.VALUE:
            return value
        raised = getattr(builtins, value, None) if kind == wire.RAISED and isinstance(value, str) else None
        if not isinstance(raised, type) or not issubclass(raised, BaseException):
            raise wire.GoneError
        raise raised if issubclass(raised, Exception) and not issubclass(raised, UnicodeError) else RuntimeError


def _prepare(names: dict[str, Any], reference: str, setup: str, remote: Callable[[str], _Remote]) -> None:
    """Fill the tests' names: the reference's imports, its other top-level names as calls to the solver, then the
    setup's.
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
    except Exception:  # noqa: BLE001, a test fails by any exception
        return False
    return True
