"""The typed wrappers of numba's compiler, which also work where numba cannot write its cache.

Reference counting is off (`_nrt`): kernels allocate nothing, and counting references to the arrays that kernels pass to
each other took nine tenths of the time.
"""

from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar, cast

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
_OPTIONS: Final = {"error_model": "numpy", "_nrt": False}


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function at its first call with arguments of some types; it runs without the GIL.

    An array's type is its dtype and number of dimensions: pass contiguous arrays that can be written, Python's integers
    (int64), and numpy's numbers for all other types. The machine code is cached beside the source or, if that folder is
    not writable, in the user's cache folder; if neither is writable, every process compiles for itself.
    """
    return _compiled(function)


def loaded_kernel(*arguments: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator as `kernel`, which compiles at the import for arguments of these numba types.

    A process that is forked behind the import has the machine code, and what numba loads for it. At a first call this
    would be a step of 20 ms, and the garbage collector would look through 50,000 objects again and again.
    """
    return lambda function: _compiled(function, f"({', '.join(arguments)},)")


def _compiled(function: Callable[P, R], *signature: str) -> Callable[P, R]:
    try:
        return cast(Callable[P, R], _compile(*signature, nogil=True, cache=True, **_OPTIONS)(function))
    except RuntimeError:  # numba's "cannot cache function: no locator available"
        return cast(Callable[P, R], _compile(*signature, nogil=True, **_OPTIONS)(function))


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Have a function compiled as a part of the kernels that call it."""
    return cast(Callable[P, R], _compile(inline="always", **_OPTIONS)(function))
