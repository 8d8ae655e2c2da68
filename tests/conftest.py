"""For all tests: one thread for torch and OpenBLAS, hypothesis without deadlines (on CI with the same examples every
time), the long tests first, and `--allowed-skips FILE`.
"""

import os
import sys

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy is imported, also by what tests start
# Images of containers forbid Python to keep compiled modules. Every worker and every process of a test would compile
# the tests and the program again, which takes longer than many tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import torch
from hypothesis import settings

from tests.support.pytest_options.skip_guard import pytest_addoption, pytest_configure

__all__ = ["pytest_addoption", "pytest_configure"]

LONG_ROOMS: Final = ("processes", "network", "adversaries", "sandbox")
"""The rooms of tests that take seconds each. They start first: at the end, one long test would keep all but one worker
waiting."""

torch.set_num_threads(1)
settings.register_profile("grailnode", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("grailnode")


@pytest.fixture(scope="session", autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep what `grailnode status` and `verify` download away from the cache of whoever runs the tests, and a vLLM that
    they have installed away from the tests.
    """
    directory = tmp_path_factory.mktemp("user-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory))
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("user-data")))
        yield directory


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {room: place for place, room in enumerate(LONG_ROOMS)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))
