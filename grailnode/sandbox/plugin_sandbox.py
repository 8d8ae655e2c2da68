"""Runs the environment of a plug-in in bubblewrap: one process loads it, and each problem or episode has a fork of it.

A fork is fresh: what foreign code or a hostile completion changes in it ends with it. Nothing in the sandbox can be
written, /tmp included, so that no fork leaves anything to another. Calls and replies are plain values, of bounded size.

A limit of time, memory or descriptors says nothing about a completion, since machines differ: it is a
SandboxLimitError.
"""

import contextlib
import json
import os
import platform
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from grailnode.sandbox import seccomp
from grailnode.sandbox.bubblewrap import BubblewrapSandbox, isolation_arguments, memory_file
from grailnode.sandbox.inside.plugin_host import MAX_CALL_BYTES, MAX_FACTS_BYTES, MAX_REPLY_BYTES
from protocol import bounded_json
from protocol.environments.base import SandboxError, SandboxLimitError
from protocol.errors import MalformedError

_ENDLESS: Final = 1 << 30  # CPU seconds
_PROCESSES: Final = 256
_FILES: Final = 64
_TRIES: Final = 4  # of a call, before each of which the process that forks is started if it has ended
_ONE_THREAD: Final = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class PluginLimits:
    """The limits of a plug-in. None of them decides a reward."""

    load_seconds: float = 120.0  # elapsed time in which the environment loads
    call_seconds: float = 30.0  # elapsed time of one call, or of all calls of an episode together
    memory_bytes: int = 2 << 30
    cpu_seconds: int = _ENDLESS  # processor time of the same


class CallError(Exception):
    """The plug-in's code raised an exception, ended its process, or answered with what is no plain value."""


class _GoneError(SandboxLimitError):
    """The process that forks has ended."""


class PluginSandbox:
    """An environment of a plug-in. It is thread-safe, and starts its process again if that has ended.

    All nodes of a run have the hash seed 0, which orders sets.
    """

    def __init__(
        self,
        base: BubblewrapSandbox,
        folders: Sequence[Path],
        name: str,
        config: bytes,
        limits: PluginLimits = PluginLimits(),
        hash_seed: int = 0,
    ) -> None:
        self._limits, self._name = limits, name
        self._python = base.interpreter.executable
        variables = {**_ONE_THREAD, "PYTHONHASHSEED": str(hash_seed)}
        isolation = isolation_arguments(base.interpreter, 4096, [folder.absolute() for folder in folders], **variables)
        self._command = (base.bwrap, *isolation, "--remount-ro", "/tmp", "--as-pid-1")  # noqa: S108
        self._start_text = json.dumps([name, json.loads(config), len(folders)]).encode()
        self._lock = threading.Lock()
        self._host: _Host | None = None
        with self._lock:
            self.facts = self._open_host().facts

    def _open_host(self) -> "_Host":
        if self._host is None:
            self._host = _Host(self._python, self._command, self._start_text, self._name, self._limits)
        return self._host

    def _fork(self) -> "Session":
        with self._lock:
            try:
                host = self._open_host()
                session, host.spare = host.spare or host.fork(), host.fork()
            except _GoneError:
                host.close()
                self._host = None
                raise
            except OSError as error:
                reason = f"this machine opens no more channels to the environment ({error.strerror or error})"
                raise SandboxLimitError(f"{reason}, so that nothing was judged") from error
            return session

    def start(self, method: str, *arguments: object) -> tuple["Session", Any]:
        """Return a fresh fork after its first call, and what that returned; as `Session.call`."""
        for _ in range(_TRIES):
            with contextlib.suppress(_GoneError):
                session = self._fork()
                return session, session.call(method, *arguments)
        raise SandboxError(f"the process of environment {self._name!r} ends again and again")

    def call(self, method: str, *arguments: object) -> Any:
        """Return what one call in a fresh fork returns; as `Session.call`."""
        session, value = self.start(method, *arguments)
        session.close()
        return value

    def close(self) -> None:
        with self._lock:
            if self._host is not None:
                self._host.close()
                self._host = None


class _Host:
    """The process that loads the environment and forks. Forks are started and ended one at a time."""

    def __init__(self, python: str, command: Sequence[str], start_text: bytes, name: str, limits: PluginLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self.spare: Session | None = None
        self._number = 0  # of the newest fork
        self._control, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(limits.call_seconds)
        main = "from grailnode.sandbox.inside import plugin_host; plugin_host.main()"
        machine = platform.machine()
        with (
            inner,
            memory_file(start_text) as stdin,
            memory_file(seccomp.build_filter(machine, "host")) as own_filter,
            memory_file(seccomp.build_filter(machine, "fork")) as fork_filter,
        ):
            own_limits = (_ENDLESS, limits.memory_bytes, 0, _FILES, _PROCESSES)
            values = (inner.fileno(), fork_filter, limits.cpu_seconds, *own_limits)
            arguments = (python, "-s", "-S", "-P", "-B", "-c", main, *map(str, values))
            self._process = _popen_for_good(
                (*command, "--seccomp", str(own_filter), "--", *arguments),
                stdin=stdin,
                pass_fds=(inner.fileno(), fork_filter, own_filter),
            )
        try:
            self.facts = _facts(self._receive(limits.load_seconds), name)
        except SandboxError as error:
            self.close()
            if not isinstance(error, _GoneError):
                raise
            raise SandboxError(
                f"environment {name!r} does not load: its process ended, or took over {limits.load_seconds:g} s"
            ) from error

    def fork(self) -> "Session":
        """Return a session with a new fork; raise _GoneError, or OSError where no descriptor is free."""
        ends: list[int] = []  # of the pipe of calls and of that of replies: out, in, out, in
        try:
            ends += os.pipe()
            ends += os.pipe()
            self._number += 1
            self._send(b"s%d" % self._number, [ends[0], ends[3]])
            return Session(self, self._number, ends.pop(1), ends.pop(1), self._limits.call_seconds)
        finally:
            for end in ends:
                os.close(end)

    def end(self, fork: int) -> None:
        """End a fork; raise _GoneError."""
        self._send(b"k%d" % fork)

    def status(self, fork: int) -> int:
        """End a fork, and return its status as `os.waitpid` gives it; raise _GoneError."""
        with self._lock:
            self._send(b"e%d" % fork)
            try:
                status = int(self._receive(self._limits.call_seconds))  # whatever foreign code sends
            except ValueError as error:
                raise _GoneError("the process that forks sent no number") from error
        return status if 0 <= status <= 0xFFFF else 0

    def _send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._control, [message], descriptors)
        except OSError as error:
            raise _GoneError(f"the process that forks has ended ({error.strerror or error})") from error

    def _receive(self, seconds: float) -> bytes:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        try:
            answer = self._control.recv(MAX_FACTS_BYTES) if poll.poll(seconds * 1000) else b""
        except OSError:
            answer = b""
        if not answer:
            raise _GoneError("the process that forks has ended")
        return answer

    def close(self) -> None:
        if self.spare is not None:
            self.spare.close()
        self._process.kill()
        self._control.close()


class Session:
    """A fork of a plug-in's process: calls in order, each with its reply. It ends with this object, or at an error."""

    def __init__(self, host: _Host, fork: int, calls: int, replies: int, seconds: float) -> None:
        self._host, self._fork, self._seconds, self._remaining = host, fork, seconds, seconds
        self._calls, self._replies = calls, replies
        self._is_open = True
        os.set_blocking(calls, False)

    def call(self, method: str, *arguments: object) -> Any:
        """Return what a method of the environment, or of its episode behind `begin`, returns: JSON's plain values.
        CallError if this or an earlier call raised an exception or returned something else; SandboxLimitError if it
        reached a limit, or was ended by a signal; SandboxError if the sandbox failed.
        """
        if not self._is_open:
            raise CallError("its process has ended")
        try:
            return self._call(method, *arguments)
        except BaseException:
            self.close()
            raise

    def _call(self, method: str, *arguments: object) -> Any:
        call = json.dumps([method, arguments]).encode()
        if len(call) > MAX_CALL_BYTES:
            raise CallError("the text is too long")
        start = time.monotonic()
        end = start + self._remaining
        self._write(len(call).to_bytes(4, "big") + call, end)
        size = int.from_bytes(self._read(4, end), "big")
        if size > MAX_REPLY_BYTES:
            raise CallError("its answer is too large")
        try:
            reply = bounded_json.parse(self._read(size, end))
        except (MalformedError, RecursionError) as error:
            raise CallError("its answer is not JSON") from error
        self._remaining -= time.monotonic() - start
        if not isinstance(reply, dict) or "value" not in reply:
            if isinstance(reply, dict) and "limit" in reply:
                raise SandboxLimitError("the environment reached its limit of memory, so that nothing was judged")
            raise CallError(_shown(reply))
        return reply["value"]

    def _write(self, data: bytes, end: float) -> None:
        view = memoryview(data)
        while view:
            self._wait(self._calls, select.POLLOUT, end)
            try:
                view = view[os.write(self._calls, view) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise self._ended() from None

    def _read(self, size: int, end: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._wait(self._replies, select.POLLIN, end)
            piece = os.read(self._replies, size - len(data))
            if not piece:
                raise self._ended()
            data += piece
        return bytes(data)

    def _wait(self, descriptor: int, event: int, end: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            raise SandboxLimitError(f"the environment took over {self._seconds:g} s, so that nothing was judged")

    def _ended(self) -> Exception:
        """Return why the fork has ended: by its own code, or by a signal, which may be this machine's."""
        self._close_channels()
        status = self._host.status(self._fork)
        number = os.WTERMSIG(status)
        if os.WIFSIGNALED(status) and number in signal.valid_signals():
            return SandboxLimitError(
                f"a process of the environment was ended by signal {number} ({signal.strsignal(number)}), so that "
                "nothing was judged"
            )
        return CallError("it ended its process")

    def close(self) -> None:
        if self._is_open:
            self._close_channels()
            with contextlib.suppress(_GoneError):
                self._host.end(self._fork)

    __del__ = close

    def _close_channels(self) -> None:
        self._is_open = False
        os.close(self._calls)
        os.close(self._replies)


def _facts(report: bytes, name: str) -> dict[str, Any]:
    """Return what the process reported when it had loaded the environment."""
    try:
        value = bounded_json.parse(report)
    except MalformedError as error:
        raise SandboxError(f"environment {name!r} does not load") from error
    facts = value.get("value") if isinstance(value, dict) else None
    if not isinstance(facts, dict):
        raise SandboxError(f"environment {name!r} does not load: {_shown(value)}")
    return facts


def _shown(reply: object) -> str:
    """Return the error in a reply as a line that a terminal can show."""
    text = reply.get("error") if isinstance(reply, dict) else None
    line = str(text or "no answer").partition("\n")[0]
    return "".join(character if character.isprintable() else "?" for character in line)[:300]


def _popen_for_good(command: Sequence[str], stdin: int, pass_fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one, and not, as bubblewrap would, with the thread that started it."""
    started: Future[subprocess.Popen[bytes]] = Future()

    def live() -> None:
        try:
            process = subprocess.Popen(
                command, stdin=stdin, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=pass_fds
            )
        except OSError as error:
            started.set_exception(SandboxError(f"bubblewrap does not start: {error.strerror}"))
            return
        started.set_result(process)
        process.wait()

    threading.Thread(target=live, daemon=True, name="plug-in's sandbox").start()
    return started.result()
