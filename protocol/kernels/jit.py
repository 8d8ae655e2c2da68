"""The typed wrapper of numba's compiler, which also works where numba cannot write its cache."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

UInt8Array = NDArray[np.uint8]
UInt16Array = NDArray[np.uint16]
UInt32Array = NDArray[np.uint32]
UInt64Array = NDArray[np.uint64]
Int64Array = NDArray[np.int64]

P = ParamSpec("P")
R = TypeVar("R")

_compile = cast(Callable[..., Callable[[Callable[..., Any]], Callable[..., Any]]], numba.njit)


def kernel(*arguments: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that compiles a function for numba types of its arguments; without any, the function is
    inlined into its callers.

    The compiled function runs without the GIL. Reference counting is off (`_nrt`): kernels allocate nothing, and
    counting references to the arrays that kernels pass to each other took nine tenths of the time. The machine code is
    cached beside the source or, if that folder is not writable, in the user's cache folder; if neither is writable,
    every process compiles for itself.
    """

    def compiled(function: Callable[P, R]) -> Callable[P, R]:
        if not arguments:
            return cast(Callable[P, R], _compile(None, inline="always", error_model="numpy", _nrt=False)(function))
        signature, options = [f"({', '.join(arguments)},)"], {"nogil": True, "error_model": "numpy", "_nrt": False}
        try:
            return cast(Callable[P, R], _compile(signature, cache=True, **options)(function))
        except RuntimeError:  # numba's "cannot cache function: no locator available"
            return cast(Callable[P, R], _compile(signature, cache=False, **options)(function))

    return compiled


def lazy_kernel(*arguments: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator as `kernel` does, whose function is compiled at its first call and not at the import."""

    def deferred(function: Callable[P, R]) -> Callable[P, R]:
        compiled = cache(lambda: kernel(*arguments)(function))

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return compiled()(*args, **kwargs)

        return call

    return deferred
