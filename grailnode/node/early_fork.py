"""Makes a copy of a node's program the fork server, early: behind its imports and before it has threads.

multiprocessing would start a new interpreter for it, which imports everything a second time: two seconds of a core for
each node, and the memory of what was imported.
"""

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing import forkserver, resource_tracker, util

from grailnode.node.supervisor import PRELOADED

_SIGINT = {signal.SIGINT}


class _InCopy(BaseException):
    """Unwinds what starts a fork server, so that the copy holds neither its lock nor its end of a pipe.

    Attributes:
        command: of the interpreter that would be the fork server; descriptors: copies of those it gets, by number.
    """

    def __init__(self, command: str, descriptors: Mapping[int, int]) -> None:
        super().__init__()
        self.command, self.descriptors = command, descriptors


def start_fork_server() -> None:
    """Start the fork server of this process as a copy of it. With another thread nothing happens, and the fork server
    is a new interpreter as ever: the copy of a lock that a thread holds would never be released.
    """
    for name in PRELOADED[1:]:  # the first one would ignore Ctrl-C here
        import_module(name)
    if threading.active_count() > 1:
        return
    resource_tracker.ensure_running()  # or it would be started by a copy, too
    start_interpreter, command, descriptors = util.spawnv_passfds, "", dict[int, int]()
    util.spawnv_passfds = _copy  # type: ignore[assignment] # positional, as its caller has it
    try:
        forkserver.ensure_running()
    except _InCopy as copy:
        command, descriptors = copy.command, dict(copy.descriptors)
    finally:
        util.spawnv_passfds = start_interpreter
    if command:
        _serve(command, descriptors)


def _copy(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Return the process id of a copy of this process, in which _InCopy is raised."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGINT)  # no moment in which Ctrl-C would end the copy
    try:
        pid = os.fork()
    except OSError:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGINT)
        raise
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGINT)
        return pid
    raise _InCopy(arguments[-1], {number: os.dup(number) for number in descriptors})


def _serve(command: str, descriptors: Mapping[int, int]) -> None:
    """Be the fork server until the last of its clients has ended."""
    for number, copy in descriptors.items():
        os.dup2(copy, number, inheritable=False)
        os.close(copy)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in fork_server.py
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGINT)
    try:
        exec(command, {})  # noqa: S102 - a line of multiprocessing, with numbers of descriptors
    except SystemExit:
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - the stack of the node's program must not go on here
        sys.excepthook(type(error), error, error.__traceback__)
    os._exit(1)
