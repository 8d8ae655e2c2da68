"""Loads the environment of a plug-in once, and forks for each problem or episode; a fork answers calls until it is
killed.

It is process 1 of its name space, which no process in it can kill. Arguments: the control socket, the descriptors of
the forks' filter, a fork's CPU seconds, then the limits of `wire.limit`. Standard input is JSON: the environment's
name, its configuration, the number of folders with wheels.

On the control socket it first reports the environment's facts, or why it did not load. Then it takes a letter and the
number of a fork: 's', with two descriptors (calls, replies), starts one; 'k' ends it; 'e' ends it and is answered with
its status. On the fork's descriptors, a frame is 4 bytes of length (big-endian) and JSON.
"""

import ctypes
import gc
import importlib.metadata
import json
import numbers
import os
import random
import resource
import signal
import socket
import sys
from typing import Any, Final

from grailnode.sandbox.inside import wire

GROUP: Final = "grailnode.environments"
MAX_CALL_BYTES: Final = 16 << 20
MAX_REPLY_BYTES: Final = 1 << 20
MAX_FACTS_BYTES: Final = 16384
_SEEDS: Final = ("problem", "problem_of_level", "begin")  # the last argument is a seed: hexadecimal digits
_libc: Final = ctypes.CDLL(None, use_errno=True)
_TEXT: Final = 300  # characters of an error that are reported
_PR_SET_SECCOMP: Final = 22
_MODE_FILTER: Final = 2


class _Program(ctypes.Structure):
    """The kernel's struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def main() -> None:
    """Serve until the control socket is closed."""
    control_descriptor, filter_descriptor, cpu_seconds, *limits = map(int, sys.argv[1:])
    control = socket.socket(fileno=control_descriptor)
    with os.fdopen(filter_descriptor, "rb") as file:
        program = file.read()
    wire.limit(*limits)
    with os.fdopen(0, "rb") as file:
        name, config, folders = json.load(file)
    # Only now: a module of a wheel must not take the place of one of Python's before the limits are set.
    sys.path += [f"/wheels/{number}" for number in range(folders)]
    random.seed(0)
    try:
        environment = _load(name, config)
        facts = {"exact": bool(environment.exact), "held_out_size": environment.held_out_size}
        facts |= {name: getattr(environment, name, default) for name, default in (("turns", 1), ("levels", {}))}
        report = json.dumps({"value": facts}).encode()
        if len(report) > MAX_FACTS_BYTES:
            raise ValueError(f"its levels and other facts take {len(report)} bytes, more than {MAX_FACTS_BYTES}")
    except BaseException as error:  # noqa: BLE001, foreign code may raise anything, SystemExit included
        report = json.dumps({"error": _text(error)}).encode()
    control.send(report)
    gc.collect()
    gc.freeze()  # what is loaded stays shared with the forks
    forks: dict[int, int] = {}
    while _serve_control(control, forks, environment, program, cpu_seconds):
        pass


def _load(name: str, config: dict[str, Any]) -> Any:
    (point,) = importlib.metadata.entry_points(group=GROUP, name=name)
    return point.load()(config)


def _serve_control(
    control: socket.socket, forks: dict[int, int], environment: Any, program: bytes, cpu_seconds: int
) -> bool:
    """Carry out a message, and return whether there was one."""
    message, descriptors, *_ = socket.recv_fds(control, 64, 2)
    if not message:
        return False
    number = int(message[1:])
    if message[:1] == b"s":
        process = forks[number] = os.fork()
        if not process:
            control.close()
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
            _serve_calls(environment, program, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        return True
    process = forks.pop(number)
    os.kill(process, signal.SIGKILL)
    status = os.waitpid(process, 0)[1]
    if message[:1] == b"e":
        control.send(b"%d" % status)
    return True


def _serve_calls(environment: Any, program: bytes, calls: int, replies: int) -> None:
    """Answer calls in a fork, which can neither start processes nor reach others."""
    random.seed(0)
    target = [environment]  # the object that is called; behind `begin`, the episode
    try:
        _install(program)
        while True:
            size = int.from_bytes(wire.read(calls, 4), "big")
            reply = _answer(target, *json.loads(wire.read(calls, size)))
            wire.write(replies, len(reply).to_bytes(4, "big") + reply)
    finally:
        os._exit(0)


def _answer(target: list[Any], method: str, arguments: list[Any]) -> bytes:
    try:
        if method in _SEEDS:
            arguments[-1] = bytes.fromhex(arguments[-1])
        value = getattr(target[0], method)(*arguments)
        if method == "begin":
            target[0], value = value, None
        if method == "reward":
            value = float(value) if isinstance(value, numbers.Real) else None
        reply = json.dumps({"value": value}).encode()
        if len(reply) > MAX_REPLY_BYTES:
            raise ValueError("its answer is too large")
    except MemoryError:  # how much memory there is differs between machines
        return json.dumps({"limit": "memory"}).encode()
    except BaseException as error:  # noqa: BLE001, foreign code may raise anything, SystemExit included
        return json.dumps({"error": _text(error)}).encode()
    return reply


def _text(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001, the text of a foreign exception is foreign code, too
        text = type(error).__name__
    return text[:_TEXT]


def _install(program: bytes) -> None:
    """Install a filter of system calls in this process, beside the one that it has."""

    code = _Program(len(program) // 8, program)
    if _libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(code), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")
