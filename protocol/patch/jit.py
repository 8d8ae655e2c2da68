"""The one place where numba meets the type checker, and where its cache may be missing."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")


def kernel(*signatures: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compile a function without the GIL, for the given signatures; without any, when another kernel needs it.

    The machine code is cached beside the source or, where that cannot be written, in the user's cache folder; where neither
    can be written, every process compiles for itself.
    """

    def compiled(function: Callable[P, R]) -> Callable[P, R]:
        arguments = {"nogil": True, "error_model": "numpy", "_nrt": False, "inline": "never" if signatures else "always"}
        try:
            dispatcher = numba.njit(list(signatures) or None, cache=True, **arguments)(function)
        except RuntimeError:  # "cannot cache function: no locator available"
            dispatcher = numba.njit(list(signatures) or None, cache=False, **arguments)(function)
        return cast(Callable[P, R], dispatcher)

    return compiled
