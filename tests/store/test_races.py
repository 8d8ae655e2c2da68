"""Races of processes in the same folders, and random histories of operations."""

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from grailnode.store import disk, local
from grailnode.store.local import LocalStore
from grailnode.store.memory import MemoryStore
from grailnode.store.state.state_store import StateStore
from roles.ports import NotFoundError, ObjectStore, StoreError
from tests.support.measuring.store_listing import paths

RUN = bytes(32)

RACE = """
import sys, time, trio
from pathlib import Path
from grailnode.store.local import LocalStore
from grailnode.store.state.state_store import StateStore

kind, root, name, seconds = sys.argv[1], Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])
store = LocalStore(root, inline=True) if kind == "local" else StateStore(root, bytes(32), inline=True)

async def race():
    end, puts = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        path = f"inbox/{puts % 2}/{name}"
        await store.put(path, name.encode())
        assert await store.get(path, 100) == name.encode()
        assert path in [info.path async for info in store.list("inbox/")]
        await store.delete(path)
        puts += 1
    print(puts)

trio.run(race)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "state"])
def test_processes_that_put_get_and_delete_in_shared_folders_see_no_error(kind: str, tmp_path: Path):
    command = [sys.executable, "-c", RACE, kind, str(tmp_path)]
    racers = [
        subprocess.Popen([*command, f"racer-{number}", "10"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for number in range(4)
    ]
    for racer in racers:
        out, errors = racer.communicate()
        assert racer.returncode == 0, errors.decode()
        assert int(out) > 0


class VanishingFolder:
    """Stands for `os.mkdir` while another process makes the same folder first, and removes it again.

    Args:
        times: calls that meet the other process.
    """

    def __init__(self, folder: Path, times: int) -> None:
        self._folder, self._times, self._mkdir = folder, times, os.mkdir

    def __call__(self, path: Path, mode: int = 0o777) -> None:
        if Path(path) == self._folder and self._times:
            self._times -= 1
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        self._mkdir(path, mode)


every_kind = pytest.mark.parametrize("kind", [LocalStore, lambda root, **options: StateStore(root, RUN, **options)])


@every_kind
def test_a_folder_that_another_process_made_and_removed_is_made_again(
    kind: type[LocalStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = kind(tmp_path, inline=True)
    monkeypatch.setattr(os, "mkdir", VanishingFolder(tmp_path / "inbox", times=2))
    trio.run(store.put, "inbox/1", b"one")
    assert trio.run(store.get, "inbox/1", 10) == b"one"


@every_kind
def test_an_object_that_another_process_deletes_as_soon_as_it_is_there_is_neither_back_nor_missed(
    kind: type[LocalStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The disk may take long to flush a folder after an object has appeared in it."""
    collector, learner, flush = kind(tmp_path, inline=True), kind(tmp_path, inline=True), disk.sync_folder

    def flush_slowly(folder: Path) -> None:
        if (tmp_path / "inbox/5").exists():
            learner._delete("inbox/5")
        flush(folder)

    trio.run(collector.put, "inbox/4", b"four")
    with monkeypatch.context() as patch:
        patch.setattr(local, "sync_folder", flush_slowly)
        trio.run(collector.put, "inbox/5", b"five")
    for store in (collector, learner, kind(tmp_path, inline=True)):
        assert trio.run(paths, store, "") == ["inbox/4"]
        with pytest.raises(NotFoundError):
            trio.run(store.get, "inbox/5", 10)


def test_an_object_in_the_place_of_a_folder_is_named(tmp_path: Path):
    (tmp_path / "inbox").write_bytes(b"")
    with pytest.raises(StoreError, match="inbox/1: a part of this path is an object, not a folder"):
        trio.run(LocalStore(tmp_path, inline=True).put, "inbox/1", b"one")


# Random histories of operations: a store answers as a dictionary would


Step = tuple[Any, ...]

# file names begin with 'f' and folder names with 'd', so that no path is a folder of another
folders = st.lists(st.sampled_from(["d", "d-", "d.", "d0", "dé"]), max_size=3)
files = st.sampled_from(["f", "f-a", "f.a", "f0", "f😀", "fa"])
object_paths = st.tuples(folders, files).map(lambda parts: "/".join([*parts[0], parts[1]]))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), object_paths, st.binary(max_size=20)),
        st.tuples(st.just("delete"), object_paths),
        st.tuples(st.just("get"), object_paths, st.integers(0, 25), st.none() | st.integers(0, 25)),
        st.tuples(st.just("list"), object_paths.map(lambda path: path[: len(path) // 2]), object_paths | st.just("")),
    ),
    max_size=30,
)


async def replay(store: ObjectStore, history: list[Step]) -> None:
    model: dict[str, bytes] = {}
    for step in history:
        match step:
            case "put", path, data:
                await store.put(path, data)
                model[path] = data
            case "delete", path:
                await store.delete(path)
                model.pop(path, None)
            case "get", path, offset, size:
                try:
                    answer = await store.get(path, 100, offset=offset, size=size)
                except NotFoundError:
                    assert path not in model
                else:
                    assert answer == model[path][offset : None if size is None else offset + size]
            case "list", prefix, after:
                expected_paths = sorted(path for path in model if path.startswith(prefix) and path > after)
                assert await paths(store, prefix, after) == expected_paths


@given(steps)
def test_a_memory_store_answers_like_a_dictionary(history: list[Step]):
    trio.run(replay, MemoryStore(), history)


@given(steps)
def test_a_local_store_answers_like_a_dictionary(history: list[Step]):
    with tempfile.TemporaryDirectory() as root:
        trio.run(replay, LocalStore(Path(root), inline=True), history)
