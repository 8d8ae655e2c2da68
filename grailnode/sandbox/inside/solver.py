"""Loads the solution, and answers the tester's calls. The solution never sees a test, so it can only forge values.

Standard input is the text of the solution. Arguments: the channels in and out, then the limits of `wire.limit`.
"""

import builtins
import os
import random
import sys
import types

from grailnode.sandbox.inside import wire

_COMPILE_ERRORS = (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError)
_NAME = "solution"


def main() -> None:
    """Serve calls until the tester ends."""
    calls, answers, *limits = map(int, sys.argv[1:])
    wire.limit(*limits)
    source = _standard_input()
    random.seed(0)
    wire.send(answers, wire.HELLO)
    try:
        code = compile(source, _NAME, "exec", dont_inherit=True)
    except _COMPILE_ERRORS:
        wire.send(answers, wire.COMPILE_ERROR)
        return
    wire.send(answers, wire.COMPILED)
    module = types.ModuleType(_NAME)
    sys.modules[_NAME] = module
    try:
        exec(code, module.__dict__)  # noqa: S102
    except BaseException:  # noqa: BLE001, foreign code may raise anything, SystemExit included
        return
    wire.send(answers, wire.LOADED)
    while True:
        _serve(calls, answers, module)


def _standard_input() -> str:
    data = b""
    while piece := os.read(0, 1 << 16):
        data += piece
    return data.decode(errors="surrogatepass")


def _serve(calls: int, answers: int, module: types.ModuleType) -> None:
    _, (name, arguments, keywords) = wire.receive(calls)
    try:
        value = getattr(module, name)(*arguments, **keywords)
        wire.send(answers, wire.VALUE, value)
    except wire.GoneError:
        raise
    except BaseException as error:  # noqa: BLE001, foreign code may raise anything, SystemExit included
        wire.send(answers, wire.RAISED, _builtin_name(error))


def _builtin_name(error: BaseException) -> str:
    """Return the name of the nearest built-in exception class, for tests that expect one."""
    return next(str(kind.__name__) for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind)
