"""LocalStore: durability when it is killed, errors of the disk, and its own files."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grailnode.store.local import LocalStore
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
    killer = start(KILL_WRITERS, tmp_path)
    assert killer.wait(30) == 0


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


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "no space left"),
        (errno.EIO, "check its health"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission denied"),
        (errno.EMFILE, "too many open files"),
        (errno.EDQUOT, "quota"),
        (errno.ETXTBSY, "busy"),
    ],
)
@pytest.mark.parametrize("place", ["write", "fsync"])
async def test_a_disk_error_is_reported_in_one_line_and_leaves_the_old_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, advice: str, place: str
):
    store = LocalStore(tmp_path)
    await store.put("a/b", b"old")

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, place, fail)
        with pytest.raises(StoreError, match=advice) as error_info:
            await store.put("a/b", b"new")
    assert str(error_info.value).startswith(f"{tmp_path}/a/b: ")
    assert "\n" not in str(error_info.value)
    assert await store.get("a/b", 10) == b"old"
    assert temporaries(tmp_path) == []


async def test_an_object_is_flushed_before_it_is_renamed(tmp_path: Path, changes: list[str]):
    store = LocalStore(tmp_path, inline=True)
    changes.clear()
    await store.put("new/folder/object", b"x")
    assert changes == ["flush .tmp", "flush .", "flush new", "rename", "flush new/folder"]


async def test_a_missing_directory_is_reported(tmp_path: Path):
    store = LocalStore(tmp_path / "store")
    (tmp_path / "store" / ".tmp").rmdir()
    (tmp_path / "store").rmdir()
    with pytest.raises(StoreError, match="disappeared 16 times"):
        await store.put("a", b"")
    with pytest.raises(NotFoundError):
        await store.get("a", 1)
    assert await paths(store, "") == []


def test_a_root_that_is_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="not a folder"):
        LocalStore(tmp_path / "file")


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
