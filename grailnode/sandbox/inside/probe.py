"""Tries to break each restriction of the sandbox, and prints as JSON those that do not hold.

Arguments: the limits of `wire.limit`.
"""

import ctypes
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from grailnode.sandbox.inside import wire

_ENVIRONMENT = {"PYTHONHASHSEED", "PYTHONUTF8", "PYTHONHOME", "PYTHONPATH", "LD_LIBRARY_PATH", "PWD", "LC_CTYPE"}


def main() -> None:
    """Print the names of the restrictions that do not hold, as a JSON list."""
    wire.limit(*map(int, sys.argv[1:]))
    attempts: dict[str, Callable[[], object]] = {
        "processes": _fork,
        "sockets": socket.socket,
        "name spaces": lambda: _call("unshare", 0x10000000),
        "password file": lambda: Path("/etc/shadow").stat(),
        "other processes": lambda: list(Path("/proc/1").iterdir()),
        "read-only root": lambda: _writable("/"),
        "read-only library": lambda: _writable(os.__file__),
        "memory": lambda: bytearray(1 << 36),
    }
    failures = [name for name, attempt in attempts.items() if not _is_refused(attempt)]
    if set(os.environ) - _ENVIRONMENT:
        failures.append("environment")
    sys.stdout.write(json.dumps(failures))


def _is_refused(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except (OSError, MemoryError):
        return True
    return False


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def _writable(path: str) -> None:
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        raise PermissionError(path)


def _call(name: str, argument: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(argument):
        raise OSError(ctypes.get_errno(), name)
