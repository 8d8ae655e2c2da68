"""Leaves most cases of a parametrized test to the slow tests, where each case takes the same path."""

from collections.abc import Iterable
from typing import Any

import pytest


def few_daily(cases: Iterable[Any], every: int) -> list[Any]:
    """Return cases for `parametrize`: the first and each `every`-th behind it run daily, the others with `-m slow`.

    A tuple is a case of several parameters.
    """
    values = (case if isinstance(case, tuple) else (case,) for case in cases)
    slow = pytest.mark.slow
    return [pytest.param(*case, marks=slow if number % every else ()) for number, case in enumerate(values)]
