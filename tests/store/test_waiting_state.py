"""A state on a disk that refuses for a while: whichever call of the disk fails, nothing is lost, and the node waits."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trio

from grailnode.store.decorators.retrying import WaitingState
from grailnode.store.memory import MemoryStore
from grailnode.store.state.state_store import StateStore
from roles.ports import NotFoundError, StateError, StoreError, TooLargeError
from tests.support.faults.decorated_store import DecoratedStore
from tests.support.simulation.network import Log
from tests.support.simulation.virtual_clock import simulated

RUN = bytes(32)
OLD, NEW = b"old" * 100, b"new" * 200
CALLS = ("open", "write", "fsync", "fdatasync", "mkdir", "rename", "unlink")
"""Functions of `os` that need space or change the disk; `open` only where it creates a file."""

REFUSALS = {
    errno.ENOSPC: "no space left on the disk",
    errno.EROFS: "read-only",
    errno.EIO: "input/output error",
    errno.EMFILE: "too many open files",
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


async def contents(state: StateStore) -> dict[str, bytes]:
    return {item.path: await state.get(item.path, 1000) async for item in state.list("")}


@pytest.mark.parametrize("number", REFUSALS, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("operation", ["put", "replace", "delete"])
def test_a_call_that_the_disk_refuses_leaves_the_old_object_or_the_new_one(
    tmp_path: Path, operation: str, number: int
) -> None:
    async def change(state: StateStore) -> None:
        await (state.delete("ledger/5") if operation == "delete" else state.put("ledger/5", NEW))

    async def scenario(root: Path, first: int) -> int:
        state = StateStore(root, RUN, inline=True)
        await state.put("ledger/4", OLD)
        before = {"ledger/4": OLD}
        if operation != "put":
            await state.put("ledger/5", OLD)
            before["ledger/5"] = OLD
        after = {"ledger/4": OLD} | ({} if operation == "delete" else {"ledger/5": NEW})
        with RefusingDisk(root, first, number).installed() as disk:
            try:
                await change(state)
            except StoreError as error:
                assert REFUSALS[number] in str(error)
                assert str(root) in str(error)
        for opened in (state, StateStore(root, RUN, inline=True)):
            assert await contents(opened) in (before, after)
        await change(state)
        for opened in (state, StateStore(root, RUN, inline=True)):
            assert await contents(opened) == after
        assert not list((root / ".tmp").iterdir())
        return disk.calls

    all_calls = trio.run(scenario, tmp_path / "all", 1 << 30)
    assert all_calls >= 3
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
