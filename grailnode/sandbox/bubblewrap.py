"""The `Sandbox` port over bubblewrap: two sandboxes for each trial, one with the solution and one with the tests.

Neither sees the other but through two pipes that carry calls and plain values; the verdict comes out of the tests' one
alone. Inside there is a standard library, read-only, a small empty /tmp, and nothing else: no network, /proc, /dev,
/etc, home, or environment.
"""

import contextlib
import json
import os
import platform
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from grailnode.sandbox import seccomp
from protocol.environments.base import ProgramLimits, ProgramResult, ProgramTests, SandboxError

_INSIDE: Final = Path(__file__).parent / "inside"
_MOUNTED: Final = "/app/grailnode/sandbox/inside"
_LIBRARIES: Final = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_PROBE_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = (0.1, 1.0)  # pauses after trials whose tester did not even start
_STARTED: Final = b"r"
_TESTER_CPU_FACTOR: Final = 2
_DESCRIBE: Final = (
    "import json,sys,sysconfig as s;p=s.get_paths();"
    "print(json.dumps(['%d.%d'%sys.version_info[:2],sys.executable,p['stdlib'],p['platstdlib'],s.get_config_var('LIBDIR'),p['purelib']]))"
)
_LIMITS: Final = ProgramLimits()
_INSTALL: Final = "install bubblewrap 0.7 or newer (Debian, Ubuntu: apt-get install bubblewrap)"
_ENABLE: Final = (
    "user name spaces must be allowed: sysctl user.max_user_namespaces above 0; on Ubuntu 24.04 and later also "
    "kernel.apparmor_restrict_unprivileged_userns=0 or an AppArmor profile for bwrap; in Docker "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined"
)


@dataclass(frozen=True)
class _Interpreter:
    """A Python and where its parts lie."""

    version: str
    executable: str
    libraries: tuple[str, ...]
    shared: str
    packages: str


class BubblewrapSandbox:
    """Tries programs in bubblewrap. Made by `open`, which refuses where walls have holes."""

    def __init__(self, bwrap: str, interpreter: _Interpreter, limits: ProgramLimits) -> None:
        self._limits = limits
        self._interpreter = interpreter
        self._command = (bwrap, *_walls(interpreter, limits))
        self._filter = seccomp.refusals(platform.machine())

    @classmethod
    def open(cls, python: str, limits: ProgramLimits = _LIMITS) -> "BubblewrapSandbox":
        """A sandbox with a version of Python, tried out.

        Args:
            python: such as '3.11'; this program's own interpreter serves where it has that version.

        Raises:
            SandboxError: it cannot be had here; the message says what to do.
        """
        if sys.platform != "linux" or platform.machine() not in seccomp.machines:
            raise SandboxError(f"running programs needs Linux on {' or '.join(seccomp.machines)}")
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxError(f"running programs needs bubblewrap, and there is no bwrap on the PATH: {_INSTALL}")
        sandbox = cls(bwrap, _find(python), limits)
        sandbox.probe()
        return sandbox

    @property
    def python(self) -> str:
        """The language's version, such as '3.11'."""
        return self._interpreter.version

    def probe(self) -> None:
        """Try every wall from inside.

        Raises:
            SandboxError: the sandbox does not start, or a wall has a hole.
        """
        with self._start("probe", b"", (), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                output, errors = process.communicate(timeout=_PROBE_SECONDS)
            except subprocess.TimeoutExpired as error:
                raise SandboxError("the sandbox does not answer") from error
        if process.returncode:
            said = errors.decode(errors="replace").strip().rpartition("\n")[2]
            raise SandboxError(f"bubblewrap cannot make a sandbox here ({said}): {_INSTALL}; {_ENABLE}")
        found = json.loads(output)
        if found["holes"]:
            raise SandboxError(f"the sandbox has holes here: {', '.join(found['holes'])}")

    def attempt(self, tests: ProgramTests, solution: str) -> ProgramResult:
        """Try a solution; see `protocol.environments.base.Sandbox`. A machine short of memory is given some time."""
        said = self._verdict(tests, solution)
        for pause in _RETRY_SECONDS:
            if said[:1] == _STARTED:
                break
            time.sleep(pause)
            said = self._verdict(tests, solution)
        if said[:1] != _STARTED:
            raise SandboxError("the sandbox did not start: too little memory, or a change of this machine's settings")
        outcomes = said[2:].ljust(len(tests.tests), b"0")
        return ProgramResult(said[1:2] == b"c", tuple(outcome == ord("1") for outcome in outcomes))

    def _verdict(self, tests: ProgramTests, solution: str) -> bytes:
        """What the tester says: that it started, whether the solution compiles, and each test's outcome; as far as it
        came.
        """
        task = json.dumps([tests.reference, tests.setup, tests.tests]).encode()
        source = solution.encode(errors="surrogatepass")
        with contextlib.ExitStack() as stack:
            answers, calls = (
                stack.enter_context(contextlib.closing(_Pipe())),
                stack.enter_context(contextlib.closing(_Pipe())),
            )
            tester = stack.enter_context(
                self._start("tester", task, (answers.read, calls.write), stdout=subprocess.PIPE, cpu=_TESTER_CPU_FACTOR)
            )
            stack.enter_context(self._start("solver", source, (calls.read, answers.write)))
            answers.close()
            calls.close()
            return _read(tester.stdout, 2 + len(tests.tests), self._limits.wall_seconds)

    @contextlib.contextmanager
    def _start(
        self,
        program: str,
        given: bytes,
        channels: Sequence[int],
        *,
        stdout: int = subprocess.DEVNULL,
        stderr: int = subprocess.DEVNULL,
        cpu: int = 1,
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A sandboxed program with bytes on its standard input; killed, with all that is in there, at the end."""
        limits = self._limits
        numbers = (*channels, cpu * limits.cpu_seconds, limits.memory_bytes, limits.file_bytes, limits.files)
        main = f"from grailnode.sandbox.inside import {program}; {program}.main()"
        python = (self._interpreter.executable, "-s", "-S", "-P", "-B", "-c", main, *map(str, numbers))
        with _memory(given) as standard_input, _memory(self._filter) as refused:
            try:
                process = subprocess.Popen(
                    (*self._command, "--seccomp", str(refused), "--", *python),
                    stdin=standard_input,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=(refused, *channels),
                )
            except OSError as error:
                raise SandboxError(f"bubblewrap does not start: {error.strerror}") from error
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def _walls(interpreter: _Interpreter, limits: ProgramLimits) -> tuple[str, ...]:
    """What bubblewrap is told, up to the command."""
    arguments = ["--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    arguments += [
        "--unshare-cgroup-try",
        "--uid",
        "65534",
        "--gid",
        "65534",
        "--hostname",
        "sandbox",
        "--cap-drop",
        "ALL",
    ]
    arguments += ["--new-session", "--die-with-parent", "--clearenv"]
    environment = {
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "PYTHONPATH": "/app",
        "LD_LIBRARY_PATH": interpreter.shared,
    }
    for name, value in environment.items():
        arguments += ["--setenv", name, value]
    for path in dict.fromkeys((*_LIBRARIES, *interpreter.libraries, interpreter.executable)):
        if Path(path).exists():
            arguments += ["--ro-bind", path, path]
    for path in (interpreter.packages, "/usr/lib/python3/dist-packages"):
        if Path(path).is_dir():  # what happens to be installed here must not help a solution
            arguments += ["--size", "4096", "--tmpfs", path, "--remount-ro", path]
    arguments += ["--ro-bind", str(_INSIDE), _MOUNTED, "--size", str(limits.scratch_bytes), "--tmpfs", "/tmp"]  # noqa: S108
    return (*arguments, "--chdir", "/tmp", "--remount-ro", "/")  # noqa: S108


def _find(version: str) -> _Interpreter:
    """An interpreter of a version.

    Raises:
        SandboxError: there is none.
    """
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    path = sys.executable if version == own else shutil.which(f"python{version}")
    if path is None:
        raise SandboxError(f"this run's programs are for Python {version}, and there is no python{version} on the PATH")
    told = subprocess.run((path, "-I", "-c", _DESCRIBE), capture_output=True, check=False, timeout=_PROBE_SECONDS)
    if told.returncode:
        raise SandboxError(f"{path} does not run")
    found, executable, standard, platform_standard, shared, packages = json.loads(told.stdout)
    if found != version:
        raise SandboxError(f"{path} is Python {found}, not {version}")
    libraries = [standard, platform_standard, *sorted(map(str, Path(shared).glob("libpython3*.so*")))]
    real = str(Path(executable).resolve())
    return _Interpreter(found, real, tuple(libraries), shared, packages)


class _Pipe:
    """Both ends of a pipe."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        self._open = True

    def close(self) -> None:
        """Close both ends; nothing happens the second time."""
        if self._open:
            self._open = False
            os.close(self.read)
            os.close(self.write)


@contextlib.contextmanager
def _memory(data: bytes) -> Iterator[int]:
    """A file in memory that holds the data, to be read from its beginning."""
    file = os.memfd_create("given")
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
        os.lseek(file, 0, os.SEEK_SET)
        yield file
    finally:
        os.close(file)


def _read(stream: IO[bytes] | None, size: int, seconds: float) -> bytes:
    """Up to `size` bytes, or what has come when the stream or the time ends."""
    assert stream is not None
    end = time.monotonic() + seconds
    data = b""
    while len(data) < size and select.select([stream], [], [], max(0.0, end - time.monotonic()))[0]:
        piece = os.read(stream.fileno(), size - len(data))
        if not piece:
            break
        data += piece
    return data
