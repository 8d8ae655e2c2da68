"""Locks on the directory of a node's state: one for each kind of process, kept until the process ends."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Final, get_args

from grailnode.node.process_launch import Kind
from grailnode.node.user_errors import StateInUseError

_LOCK_SECONDS: Final = 5.0  # longer than a killed process takes to release its lock


def lock_state(directory: Path, kind: str, seconds: float = _LOCK_SECONDS) -> IO[str]:
    """Lock a state directory for one kind of process, until the returned file is closed or the process ends;
    StateInUseError if another process keeps the lock for so many seconds.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = (directory / f".{kind}.lock").open("w")
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= deadline:
                file.close()
                raise StateInUseError(
                    f"{directory}: in use by another {kind} process; stop it, or use another --name"
                ) from None
            time.sleep(0.1)
        else:
            return file


def is_locked(directory: Path, kind: str) -> bool:
    """Return whether a process of a kind runs on a state directory."""
    try:
        lock_state(directory, kind, 0.0).close()
    except StateInUseError:
        return True
    return False


@contextmanager
def lock_whole_state(directory: Path) -> Iterator[None]:
    """Lock a state directory for all kinds of processes, as a stopped node allows.

    While one lock is taken, it keeps none of the others: a node that starts meanwhile would give up.
    """
    deadline = time.monotonic() + _LOCK_SECONDS
    with ExitStack() as locks:
        while True:
            with ExitStack() as attempt:
                try:
                    for kind in get_args(Kind):
                        attempt.enter_context(lock_state(directory, kind, 0.0))
                except StateInUseError:
                    if time.monotonic() >= deadline:
                        raise
                else:
                    locks.push(attempt.pop_all())
                    break
            time.sleep(0.1)
        yield
