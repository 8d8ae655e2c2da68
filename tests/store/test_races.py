"""Processes that store, read and delete objects in the same folders, which become empty and vanish again and again."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from grailnode.store import disk, local
from grailnode.store.local import LocalStore
from grailnode.store.state.state_store import StateStore
from roles.ports import NotFoundError, StateError, StoreError

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


@pytest.mark.parametrize("kind", [LocalStore, lambda root, **options: StateStore(root, RUN, **options)])
def test_a_folder_that_another_process_made_and_removed_is_made_again(
    kind: type[LocalStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = kind(tmp_path, inline=True)
    monkeypatch.setattr(os, "mkdir", VanishingFolder(tmp_path / "inbox", times=2))
    trio.run(store.put, "inbox/1", b"one")
    assert trio.run(store.get, "inbox/1", 10) == b"one"


def test_an_object_that_another_process_deletes_as_soon_as_it_is_there_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    collector, learner, flush = LocalStore(tmp_path, inline=True), LocalStore(tmp_path, inline=True), disk.sync_folder

    def flush_slowly(folder: Path) -> None:
        if (tmp_path / "inbox/5").exists():
            learner._delete("inbox/5")
        flush(folder)

    with monkeypatch.context() as patch:
        patch.setattr(local, "sync_folder", flush_slowly)
        trio.run(collector.put, "inbox/5", b"five")
    with pytest.raises(NotFoundError):
        trio.run(collector.get, "inbox/5", 10)


def test_an_object_in_the_place_of_a_folder_is_named(tmp_path: Path):
    (tmp_path / "inbox").write_bytes(b"")
    with pytest.raises(StoreError, match="inbox/1: a part of this path is an object, not a folder"):
        trio.run(LocalStore(tmp_path, inline=True).put, "inbox/1", b"one")
    with pytest.raises(StateError, match="inbox/1: a part of its path is a file"):
        trio.run(StateStore(tmp_path, RUN, inline=True, repairing=True).put, "inbox/1", b"one")
