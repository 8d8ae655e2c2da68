"""LocalStore and StateStore on a disk: durability, races of processes, errors of the disk, and what lies there else."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from grailnode.store import disk, local
from grailnode.store.local import LocalStore
from grailnode.store.state.state_store import StateStore
from roles.ports import NotFoundError, StoreError
from tests.support.measuring.store_listing import paths

HOLD_A_TEMPORARY = """
import sys, time
from pathlib import Path
from grailnode.store.disk import locked_file
with locked_file(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""

KILL_WRITERS = """
import os, signal, sys, time, trio
from pathlib import Path
from grailnode.store.local import LocalStore

root = Path(sys.argv[1])

async def write_for_ever():
    store = LocalStore(root, inline=True)
    while True:
        for number in range(256):
            await store.put("a/b", bytes([number]) * 300_000)

async def check():
    store = LocalStore(root, inline=True)
    data = await store.get("a/b", 300_000)
    assert len(data) == 300_000 and len(set(data)) == 1, "torn"
    assert not list((root / ".tmp").iterdir()), "not swept"
    assert [info.path async for info in store.list("")] == ["a/b"], "listed"

trio.run(LocalStore(root, inline=True).put, "a/b", bytes(300_000))
for number in range(25):
    writer = os.fork()
    if writer == 0:
        trio.run(write_for_ever)
    time.sleep(0.03 + number / 1000)
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    trio.run(check)
print("whole after every kill", flush=True)
"""


def start(program: str, argument: Path) -> "subprocess.Popen[bytes]":
    """Run a program and wait for its first line of output."""
    process = subprocess.Popen([sys.executable, "-c", program, str(argument)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def temporaries(root: Path) -> list[Path]:
    return sorted((root / ".tmp").iterdir())


@pytest.mark.parametrize("is_there", [False, True])
def test_a_lock_is_private_and_can_be_taken_on_a_read_only_disk(
    tmp_path: Path, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, open_file = tmp_path / "lock", os.open
    if is_there:
        lock.touch(0o600)

        def open_to_read(path: Any, flags: int, *mode: int) -> int:
            if flags & (os.O_RDWR | os.O_CREAT):
                raise OSError(errno.EROFS, "read-only file system")
            return open_file(path, flags, *mode)

        monkeypatch.setattr(os, "open", open_to_read)
    with disk.locked(lock):
        assert lock.stat().st_mode & 0o777 == 0o600


@pytest.fixture
def changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each flush is added with its folder, or ".tmp" for a temporary file, and each rename."""
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def recorded_fsync(descriptor: int) -> None:
        flushed = Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(tmp_path)
        events.append(f"flush {'.tmp' if flushed.parts[:1] == ('.tmp',) else flushed}")
        fsync(descriptor)

    def recorded_rename(self: Path, target: Path) -> Path:
        events.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    return events


def test_opening_removes_temporary_files_of_dead_writers_only(tmp_path: Path):
    LocalStore(tmp_path)
    (tmp_path / ".tmp" / "orphan").write_bytes(b"half of an object")
    writer = start(HOLD_A_TEMPORARY, tmp_path / ".tmp" / "locked")
    try:
        LocalStore(tmp_path)
        assert temporaries(tmp_path) == [tmp_path / ".tmp" / "locked"]
    finally:
        writer.kill()
        writer.wait()
    LocalStore(tmp_path)
    assert temporaries(tmp_path) == []


def test_a_writer_killed_at_any_time_leaves_a_whole_object(tmp_path: Path):
    assert start(KILL_WRITERS, tmp_path).wait(30) == 0


async def test_listings_leave_out_files_that_no_put_created(tmp_path: Path):
    store = LocalStore(tmp_path)
    await store.put("a/object", b"x")
    (tmp_path / ".tmp" / "temporary").write_bytes(b"")
    (tmp_path / "a" / ".hidden").write_bytes(b"")
    (tmp_path / "a" / "link").symlink_to(tmp_path / "a" / "object")
    (tmp_path / "folder-link").symlink_to(tmp_path / "a")
    os.mkfifo(tmp_path / "a" / "pipe")
    (tmp_path / "a" / "empty").mkdir()
    (tmp_path / "a" / os.fsdecode(b"not-utf8-\xff")).write_bytes(b"")
    assert await paths(store, "") == ["a/object"]


async def test_links_and_pipes_are_not_read(tmp_path: Path):
    store = LocalStore(tmp_path / "store")
    (tmp_path / "secret").write_bytes(b"of another owner")
    (tmp_path / "store" / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "store" / "pipe")
    with pytest.raises(StoreError, match="symbolic link"):
        await store.get("link", 100)
    with pytest.raises(NotFoundError):
        await store.get("pipe", 100)


async def test_an_object_is_flushed_before_it_is_renamed(tmp_path: Path, changes: list[str]):
    store = LocalStore(tmp_path, inline=True)
    changes.clear()
    await store.put("new/folder/object", b"x")
    assert changes == ["flush .tmp", "flush .", "flush new", "rename", "flush new/folder"]


async def test_a_missing_directory_and_a_root_that_is_a_file_are_reported(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="not a folder"):
        LocalStore(tmp_path / "file")
    store = LocalStore(tmp_path / "store")
    (tmp_path / "store" / ".tmp").rmdir()
    (tmp_path / "store").rmdir()
    with pytest.raises(StoreError, match="disappeared 16 times"):
        await store.put("a", b"")
    with pytest.raises(NotFoundError):
        await store.get("a", 1)
    assert await paths(store, "") == []


async def test_deleting_the_last_object_removes_its_folders(tmp_path: Path):
    store = LocalStore(tmp_path)
    await store.put("a/b/c/d", b"")
    await store.put("a/x", b"")
    await store.delete("a/b/c/d")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["x"]
    await store.delete("a/x")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp"]


async def test_a_deletion_is_on_the_disk_when_it_returns(tmp_path: Path, changes: list[str]):
    store = LocalStore(tmp_path, inline=True)
    for path in ("a/b/one", "a/two"):
        await store.put(path, b"x")
    changes.clear()
    await store.delete("a/b/one")
    assert changes == ["flush a/b", "flush a"]  # the folder of the object, then its parent, from which it was removed
    changes.clear()
    await store.delete("a/nothing")
    assert changes == []


# Races of processes in the same folders


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


def test_scratch_bytes_are_on_the_disk_without_a_name_and_in_memory_if_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    keep, data = LocalStore(tmp_path).scratch(), os.urandom(100_000)
    kept = [keep(data[:60_000]), keep(data[60_000:]), keep(b"")]
    assert not any(isinstance(item, bytes) for item in kept) and [*map(len, kept)] == [60_000, 40_000, 0]
    assert b"".join(item[:] for item in kept) == data and kept[1][10:30] == data[60_010:60_030]
    assert kept[0][59_990:70_000] == data[59_990:60_000] and kept[1][50_000:] == b""
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", refuse)
    assert keep(data) == data
