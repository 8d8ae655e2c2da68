"""For all tests: one thread for torch and OpenBLAS, hypothesis without deadlines (on CI with the same examples every
time), the long tests first, and `--allowed-skips FILE`.
"""

import gc
import os
import sys

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # for torch and numpy, also in what tests start
# Images of containers forbid Python to keep compiled modules. Every worker and every process of a test would compile
# the tests and the program again, which takes longer than many tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from collections.abc import Iterator
from inspect import iscoroutinefunction
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Final

import pytest
from hypothesis import settings

from tests.support.pytest_options.skip_guard import pytest_addoption, pytest_configure
from tests.support.simulation.virtual_clock import simulated

__all__ = ["pytest_addoption", "pytest_configure"]

LONGEST: Final = (
    "test_training", "test_following", "test_state_of_processes", "test_demo",
    "test_sites", "test_examples", "test_network_of_processes", "test_recipes_of_contributing", "test_seeded_faults",
    "test_image_steps", "test_reasoning_gym", "test_event_loop", "test_other_processors", "test_damaged_state",
    "test_s3_store", "test_failing_storage",
    "processes", "network", "adversaries", "sandbox",
)  # fmt: skip
"""The files and rooms of tests that take seconds to minutes each, longest first. They start first: at the end, one long
test would keep all but one worker waiting."""

ROOMS_IN_VIRTUAL_TIME: Final = ("attacks", "network", "outer", "roles")
"""Every `async def test_...` of these rooms is `@simulated`: none of them waits for real time."""

gc.disable()  # until all tests are collected: what their modules consist of is no garbage
sys.dont_write_bytecode = False
settings.register_profile("grailnode", deadline=None, derandomize="CI" in os.environ, max_examples=20)
settings.load_profile("grailnode")
settings.register_profile("thorough", max_examples=100)  # as .ci/run has it


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


@pytest.fixture(scope="session", autouse=True)
def disk_without_flushes() -> Iterator[None]:
    """Let states that tests keep on a disk not wait for it: no test here ends in a loss of power."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, os.fstat)  # which refuses a closed file, too
        yield


def pytest_xdist_auto_num_workers() -> int:
    """One worker more than processors: many tests wait for windows, servers and processes."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_itemcollected(item: pytest.Item) -> None:
    is_of_room = item.path.parent.name in ROOMS_IN_VIRTUAL_TIME
    if is_of_room and isinstance(item, pytest.Function) and iscoroutinefunction(item.obj):
        item.obj = simulated(item.obj)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deal the longest files to the workers, longest first, and give each an equal share of the other tests.

    `--dist worksteal` gives each worker one piece of the list to begin with.
    """
    order = {name: place for place, name in enumerate(LONGEST)}
    last, workers = len(order), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))

    def place(item: pytest.Item) -> int:
        return min(order.get(item.path.stem, last), order.get(item.path.parent.name, last))

    items.sort(key=place)
    long, others = ([item for item in items if (place(item) < last) is is_long] for is_long in (True, False))
    files = [list(tests) for _, tests in groupby(long, attrgetter("path"))]
    size, shares = -(-len(items) // workers), []
    for worker in range(workers):
        share = list(chain.from_iterable(files[worker::workers]))
        space = max(0, size - len(share))
        shares += [*share, *others[:space]]
        del others[:space]
    items[:] = [*shares, *others]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Collect garbage in the process that only distributes the tests, and collects none."""
    if session.config.pluginmanager.has_plugin("dsession"):
        gc.enable()


def pytest_collection_finish() -> None:
    """Collect garbage from here on, and leave the modules and the list of tests out of it, which are large."""
    gc.collect()
    gc.freeze()
    gc.enable()
