"""The store of a node's own state: what the disk does to a file or refuses is noticed, and the line names the file."""

import errno
import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trio

from grailnode.store.decorators.retrying import WaitingState
from grailnode.store.local import LocalStore
from grailnode.store.memory import MemoryStore
from grailnode.store.state import envelope
from grailnode.store.state.name_list import NAME
from grailnode.store.state.state_store import IntactStateError, StateStore
from roles.ports import NotFoundError, StateError, StoreError, TooLargeError
from tests.support.faults.decorated_store import DecoratedStore
from tests.support.measuring.store_listing import paths
from tests.support.pytest_options.few_daily import few_daily
from tests.support.simulation.network import Log
from tests.support.simulation.virtual_clock import simulated

RUN, OTHER_RUN = bytes(32), bytes(31) + b"\x01"
DATA = random.Random(0).randbytes(300)


def store(root: Path) -> StateStore:
    return StateStore(root, RUN, inline=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    trio.run(store(tmp_path).put, "ledger/5", DATA)
    return tmp_path / "ledger/5"


def refusal(root: Path, path: str = "ledger/5") -> str:
    """The line with which an object is refused."""
    with pytest.raises(StateError) as error:
        trio.run(store(root).get, path, 1000)
    line = str(error.value)
    assert line.startswith(str(root / path))
    assert "\n" not in line
    if isinstance(error.value, IntactStateError):
        return line
    assert "it holds a window of this validator's ledger" in line
    assert line.endswith("run `grailnode repair` (docs/guide/operate.md)")
    return line


@pytest.mark.parametrize("every", few_daily([7, 1], 2))  # by sevens, every byte has a bent bit
def test_every_bent_bit_is_refused(file: Path, tmp_path: Path, every: int):
    whole = file.read_bytes()
    for place in range(0, 8 * len(whole), every):
        damage = bytearray(whole)
        damage[place // 8] ^= 1 << place % 8
        file.write_bytes(damage)
        refusal(tmp_path)


def test_every_cut_is_refused(file: Path, tmp_path: Path):
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        refusal(tmp_path)
    file.write_bytes(whole + b"\0")
    assert f"{len(whole) + 1} bytes long instead of {len(whole)}" in refusal(tmp_path)


ChangeFile = Callable[[Path], object]


def _replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _replace_by_link(file: Path) -> None:
    file.rename(file.with_suffix(".away"))
    file.symlink_to(file.with_suffix(".away"))


@pytest.mark.parametrize(
    "change, what",
    [
        (lambda file: file.write_bytes(b""), "empty"),
        (lambda file: file.write_bytes(bytes(file.stat().st_size)), "has no envelope"),
        (lambda file: file.write_bytes(DATA), "has no envelope"),
        (Path.unlink, "missing"),
        (_replace_by_folder, "not a regular file"),
        (_replace_by_link, "a symbolic link"),
    ],
    ids=["empty", "zeros", "without envelope", "missing", "folder", "link"],
)
def test_the_line_says_what_is_wrong(file: Path, tmp_path: Path, change: ChangeFile, what: str):
    change(file)
    assert f"{file}: {what}" in refusal(tmp_path)


def test_a_file_of_another_object_form_or_run_is_refused(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trio.run(store(tmp_path).put, "ledger/4", DATA)
    file.write_bytes((tmp_path / "ledger/4").read_bytes())
    assert "holds another object, ledger/4" in refusal(tmp_path)
    file.write_bytes(envelope.encode("ledger/5", OTHER_RUN, DATA) + DATA)
    assert f"is of another run, {OTHER_RUN.hex()}" in refusal(tmp_path)
    monkeypatch.setattr(envelope, "FORM", 2)
    contents = envelope.encode("ledger/5", RUN, DATA) + DATA
    monkeypatch.undo()
    file.write_bytes(contents)
    assert "of form 2, which another version of this program wrote; this one reads form 1" in refusal(tmp_path)


async def test_a_missing_object_is_noticed_by_listing_and_after_a_restart(tmp_path: Path):
    state = store(tmp_path)
    for number in range(3):
        await state.put(f"ledger/{number}", DATA)
    await state.put("outbox/1", DATA)
    (tmp_path / "ledger/2").unlink()
    for other in (state, store(tmp_path)):
        with pytest.raises(StateError, match=re.escape(f"{tmp_path}/ledger/2: missing")):
            await paths(other, "ledger/")
        assert await paths(other, "outbox/") == ["outbox/1"]
    (tmp_path / "ledger/0").unlink()
    with pytest.raises(StateError, match=re.escape("ledger/0: missing (and 1 more)")):
        await paths(state, "")


async def test_threads_that_store_delete_and_list_at_once_miss_nothing(tmp_path: Path):
    one, other = StateStore(tmp_path, RUN), StateStore(tmp_path, RUN)

    async def write(task: int) -> None:
        for number in range(20):
            await one.put(f"inbox/{task}-{number}", DATA)
            await other.delete(f"inbox/{task}-{number}")

    async def list_for_ever(state: StateStore) -> None:
        while True:
            await paths(state, "inbox/")

    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as writers:
            for task in range(4):
                writers.start_soon(write, task)
            for state in (one, other):
                nursery.start_soon(list_for_ever, state)
        nursery.cancel_scope.cancel()
    assert await paths(store(tmp_path), "") == []


async def test_damaged_lines_of_the_list_of_names_do_no_harm_while_the_files_are_there(tmp_path: Path):
    for number in range(4):
        await store(tmp_path).put(f"ledger/{number}", DATA)
    whole = (tmp_path / NAME).read_bytes()
    title = whole.index(b"\n") + 1
    for place in range(8 * title, 8 * len(whole)):
        damage = bytearray(whole)
        damage[place // 8] ^= 1 << place % 8
        (tmp_path / NAME).write_bytes(damage)
        assert len(await paths(store(tmp_path), "ledger/")) == 4
    for size in range(title, len(whole)):
        (tmp_path / NAME).write_bytes(whole[:size])
        assert len(await paths(store(tmp_path), "ledger/")) == 4


@pytest.mark.parametrize("change", [Path.unlink, lambda file: file.write_bytes(b""), _replace_by_folder])
def test_a_state_without_its_list_of_names_is_refused_until_repaired(file: Path, tmp_path: Path, change: ChangeFile):
    change(tmp_path / NAME)
    with pytest.raises(StateError, match=re.escape(f"{tmp_path / NAME}: ")):
        store(tmp_path)
    repaired = StateStore(tmp_path, RUN, inline=True, repairing=True)
    assert trio.run(repaired.scan) == {"ledger/5": None}
    assert trio.run(store(tmp_path).get, "ledger/5", 1000) == DATA


def test_a_repair_touches_neither_the_state_of_another_run_nor_one_that_it_may_not_read(file: Path, tmp_path: Path):
    for repairing in (False, True):
        with pytest.raises(IntactStateError, match="of another run"):
            StateStore(tmp_path, OTHER_RUN, inline=True, repairing=repairing)
    (tmp_path / NAME).unlink()
    with pytest.raises(IntactStateError, match="is of another run"):
        trio.run(StateStore(tmp_path, OTHER_RUN, inline=True, repairing=True).scan)


def test_a_file_that_this_user_may_not_read_is_refused(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    open_file = os.open

    def refuse(path: Path, *arguments: int) -> int:
        if path == file:
            raise PermissionError(errno.EACCES, "permission denied", str(path))
        return open_file(path, *arguments)

    monkeypatch.setattr(os, "open", refuse)  # root may read every file
    for read in (partial(store(tmp_path).get, "ledger/5", 1000), StateStore(tmp_path, RUN, repairing=True).scan):
        with pytest.raises(IntactStateError, match=f"{file}: permission denied; give it to the user who runs the node"):
            trio.run(read)


async def test_the_list_of_names_stays_short(tmp_path: Path):
    state = store(tmp_path)
    for number in range(800):
        await state.put(f"pending/{number}", b"")
        await state.delete(f"pending/{number}")
    await state.put("trust", DATA)
    before = (tmp_path / NAME).stat().st_size
    state = store(tmp_path)
    assert (tmp_path / NAME).stat().st_size < before / 100
    assert await paths(state, "") == ["trust"]


async def test_what_a_node_makes_again_by_itself_may_be_missing(tmp_path: Path):
    state = store(tmp_path)
    for path in ("proof-of-work", "announcements/x"):
        await state.put(path, DATA)
        (tmp_path / path).unlink()
        with pytest.raises(NotFoundError):
            await state.get(path, 1000)
    assert await paths(state, "") == []


# A disk that refuses for a while: whichever call of it fails, nothing is lost, and the node waits


OLD, NEW = b"old" * 100, b"new" * 200
CALLS = ("open", "write", "fsync", "fdatasync", "mkdir", "rename", "unlink")
"""Functions of `os` that need space or change the disk; `open` only where it creates a file."""

REFUSALS = {
    errno.ENOSPC: "no space left on the disk",
    errno.EROFS: "read-only",
    errno.EIO: "check its health",
    errno.EMFILE: "too many open files",
    errno.EACCES: "permission denied",
    errno.EDQUOT: "quota",
    errno.ETXTBSY: "busy",
}


class RefusingDisk:
    """Refuses changes below a directory, from one call on.

    Args:
        first: how many calls it allows before; number: the error of the others.
    """

    def __init__(self, root: Path, first: int, number: int = errno.ENOSPC) -> None:
        self.calls = 0
        self._root = str(root)
        self._first = first
        self._number = number

    @contextmanager
    def installed(self) -> Iterator["RefusingDisk"]:
        """Stand in the place of the functions of `os`."""
        with ExitStack() as stack:
            for name in CALLS:
                stack.enter_context(mock.patch.object(os, name, self._refusing(name, getattr(os, name))))
            yield self

    def _refusing(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *arguments: Any, **options: Any) -> Any:
            place = str(Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else target)
            is_change = name != "open" or bool(arguments[0] & os.O_CREAT and not os.path.lexists(place))
            if place.startswith(self._root) and is_change:
                self.calls += 1
                if self.calls > self._first:
                    if name == "write":
                        function(target, bytes(arguments[0])[: len(arguments[0]) // 2])
                    raise OSError(self._number, os.strerror(self._number))
            return function(target, *arguments, **options)

        return call


class SometimesFailing(DecoratedStore):
    """A store that refuses every operation while it has an error number, or raises an error of its own."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.error = 0
        self.damage: Exception | None = None

    async def before(self, operation: str, path: str) -> None:
        if self.damage is not None:
            raise self.damage
        if self.error:
            cause = OSError(self.error, os.strerror(self.error))
            raise StoreError(f"{path}: {os.strerror(self.error).lower()}") from cause


async def contents(state: LocalStore | StateStore) -> dict[str, bytes]:
    return {item.path: await state.get(item.path, 1000) async for item in state.list("")}


def local_store(root: Path) -> LocalStore:
    return LocalStore(root, inline=True)


@pytest.mark.parametrize("number", REFUSALS, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("operation", ["put", "replace", "delete"])
@pytest.mark.parametrize("store", [store, local_store], ids=["state", "local"])
def test_a_call_that_the_disk_refuses_leaves_the_old_object_or_the_new_one(
    tmp_path: Path, store: Callable[[Path], LocalStore | StateStore], operation: str, number: int
) -> None:
    async def change(state: LocalStore | StateStore) -> None:
        await (state.delete("ledger/5") if operation == "delete" else state.put("ledger/5", NEW))

    async def scenario(root: Path, first: int) -> int:
        state = store(root)
        before = {"ledger/4": OLD} | ({} if operation == "put" else {"ledger/5": OLD})
        for path, data in before.items():
            await state.put(path, data)
        after = {"ledger/4": OLD} | ({} if operation == "delete" else {"ledger/5": NEW})
        with RefusingDisk(root, first, number).installed() as disk:
            try:
                await change(state)
            except (StoreError, IntactStateError) as error:
                assert REFUSALS[number] in str(error)
                assert str(error).startswith(f"{root}/ledger/5")
                assert "\n" not in str(error)
        for opened in (state, store(root)):
            assert await contents(opened) in (before, after)
        await change(state)
        for opened in (state, store(root)):
            assert await contents(opened) == after
        assert not list((root / ".tmp").iterdir())
        return disk.calls

    all_calls = trio.run(scenario, tmp_path / "all", 1 << 30)
    assert all_calls >= 2
    for first in range(all_calls):
        trio.run(scenario, tmp_path / str(first), first)


@simulated
async def test_operations_wait_until_the_disk_takes_them_and_say_so_once() -> None:
    disk, log = SometimesFailing(), Log("node")
    state = WaitingState(disk, log)
    await state.put("a", OLD)
    disk.error = errno.ENOSPC
    async with trio.open_nursery() as nursery:
        nursery.start_soon(state.put, "a", NEW)
        nursery.start_soon(state.delete, "b")
        await trio.sleep(60)
        assert len(nursery.child_tasks) == 2
        disk.error = errno.EROFS
        await trio.sleep(60)
        disk.error = 0
    assert await state.get("a", 1000) == NEW
    assert [name for name, _ in log.events] == ["disk-failing", "disk-failing", "waited"]
    causes = [fields["error"] for fields in log.named("disk-failing")]
    assert "no space left on device; this process waits" in causes[0]
    assert "read-only file system" in causes[1]
    assert 59 < log.named("disk-failing")[1]["seconds"] < 62
    assert 119 < log.named("waited")[0]["seconds"] < 122


@simulated
async def test_a_task_that_is_cancelled_while_it_waits_leaves_nothing_behind() -> None:
    disk, log = SometimesFailing(), Log("node")
    state = WaitingState(disk, log)
    for _ in range(2):
        disk.error = errno.ENOSPC
        with trio.move_on_after(10):
            await state.put("a", OLD)
        disk.error = 0
        await state.put("a", OLD)
    assert [name for name, _ in log.events] == ["disk-failing", "waited"] * 2


@simulated
async def test_what_another_try_would_not_change_is_raised_at_once() -> None:
    state = WaitingState(SometimesFailing(), Log("node"))
    await state.put("a", OLD)
    with pytest.raises(NotFoundError):
        await state.get("b", 10)
    with pytest.raises(TooLargeError):
        await state.get("a", 10)
    damaged = SometimesFailing()
    damaged.damage = StateError("a", "damaged")
    with pytest.raises(StateError):
        await WaitingState(damaged, Log("node")).put("a", OLD)


def test_what_lies_in_the_place_of_an_object_is_named(tmp_path: Path) -> None:
    (tmp_path / "trust").mkdir()
    (tmp_path / "ledger").write_bytes(b"")
    state = StateStore(tmp_path, RUN, inline=True, repairing=True)
    with pytest.raises(StateError, match=r"trust: a folder, and not a file; it holds the oldest chain"):
        trio.run(state.put, "trust", OLD)
    with pytest.raises(StateError, match="ledger/5: a part of its path is a file"):
        trio.run(state.put, "ledger/5", OLD)
