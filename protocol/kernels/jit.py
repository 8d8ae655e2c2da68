"""The one place where numba meets the type checker, and where its cache may be missing."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")

_compile = cast(Callable[..., Callable[[Callable[..., Any]], Callable[..., Any]]], numba.njit)


def kernel(*arguments: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compile a function, to run without the GIL, for arguments of the given types; without any, to be inlined in
    others.

    No reference counts (`_nrt`): kernels allocate nothing, and counting the arrays that pass from one to another took
    nine tenths of the time. The machine code is cached beside the source or, where that cannot be written, in the
    user's cache folder; where neither can be written, every process compiles for itself.
    """

    def compiled(function: Callable[P, R]) -> Callable[P, R]:
        if not arguments:
            return cast(Callable[P, R], _compile(None, inline="always", error_model="numpy", _nrt=False)(function))
        signature, options = [f"({', '.join(arguments)})"], {"nogil": True, "error_model": "numpy", "_nrt": False}
        try:
            return cast(Callable[P, R], _compile(signature, cache=True, **options)(function))
        except RuntimeError:  # numba's "cannot cache function: no locator available"
            return cast(Callable[P, R], _compile(signature, cache=False, **options)(function))

    return compiled
