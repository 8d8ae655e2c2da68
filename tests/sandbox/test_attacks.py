"""Programs that try to leave the sandbox, to outlive the trial, or to pass tests without a correct answer."""

import os
import time
from pathlib import Path

import pytest

from grailnode.sandbox import BubblewrapSandbox
from protocol.environments.base import ProgramLimits, ProgramTests, SandboxError
from tests.support.builders.tasks import OWN

FILES = 50 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
"""A limit of open files that no other process of these tests gives its sandboxes."""

PRELUDE = """
def tried(*attempts):
    out = []
    for name, attempt in attempts:
        try:
            out.append((name, str(attempt())[:200]))
        except (OSError, MemoryError, ValueError, RuntimeError):
            pass
    return out
"""


def has_gain(sandbox: BubblewrapSandbox, body: str) -> bool:
    """Return whether attack() of a solution reports something it should not be able to do, or does not return."""
    task = ProgramTests("def attack(): pass", "", ("assert attack() == []",))
    return sandbox.attempt(task, PRELUDE + body).passes != (True,)


def test_the_files_of_this_machine_are_not_those_of_a_solver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, wrapper = BubblewrapSandbox.open(OWN).bwrap, tmp_path / "bwrap"
    wrapper.write_text(f'#!/bin/sh\n{real} "$@"\nexit $?\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda _: str(wrapper))
    sandbox = BubblewrapSandbox.open(OWN)
    task = ProgramTests("def f(): pass", "", ("assert f() is None",))
    assert sandbox.attempt(task, "import time\ndef f(): time.sleep(0.5)").passes == (True,)


def test_the_gains_function_detects_a_gain(sandbox: BubblewrapSandbox) -> None:
    assert has_gain(sandbox, "def attack(): return tried(('works', lambda: 1))")
    assert not has_gain(sandbox, "def attack(): return tried(('fails', lambda: open('/nowhere')))")


ATTACKS_WITHOUT_GAIN = {
    "fork bomb": """
import _thread, os, subprocess, threading
def attack(): return tried(
    ('fork', os.fork), ('vfork', lambda: subprocess.run(['/bin/true'])),
    ('spawn', lambda: os.posix_spawn('/bin/true', [], {})),
    ('thread', lambda: _thread.start_new_thread(print, ())),
    ('threading', lambda: threading.Thread(target=print).start()))
""",
    "memory": """
import mmap, os
def grow():
    kept = []
    while True: kept.append(bytearray(1 << 20))
def many():
    kept = []
    while True: kept.append(kept[-1] + kept[-1] if kept else [0] * 1000)
def attack(): return tried(
    ('grow', grow), ('many', many), ('map', lambda: mmap.mmap(-1, 1 << 31)), ('memfd', lambda: os.memfd_create('a')))
""",
    "disk": """
import os
def fill():
    for i in range(1000):
        with open(f'/tmp/{i}', 'wb') as f:
            for _ in range(4): f.write(bytes(1 << 18))
def big():
    with open('/tmp/big', 'wb') as f: f.write(bytes(1 << 22))
def attack(): return tried(('big', big), ('fill', fill))
""",
    "network": """
import socket
def attack(): return tried(
    ('tcp', lambda: socket.create_connection(('1.1.1.1', 53), 1)),
    ('local', lambda: socket.create_connection(('127.0.0.1', 22), 1)),
    ('unix', lambda: socket.socket(socket.AF_UNIX)), ('pair', socket.socketpair),
    ('name', lambda: socket.gethostbyname('localhost')),
    ('netlink', lambda: socket.socket(16, 3)))
""",
    "files of others": """
import os
def listed(path):
    if not os.listdir(path): raise OSError
    return path
def attack(): return tried(*[(p, lambda p=p: open(p).read() if not os.path.isdir(p) else os.listdir(p)) for p in (
    '/etc/shadow', '/etc/passwd', '/proc/self/environ', '/proc/1/environ', '/proc/self/mem', '/dev/mem', '/home',
    '/root/.ssh', '/sys', '/run', '/var', '/etc/hostname', '/dev/shm', '/root')],
    *[(p, lambda p=p: listed(p)) for p in (
    os.path.dirname(os.__file__) + '/site-packages', '/usr/lib/python3/dist-packages', '/lib/python3/dist-packages')])
""",
    "writing outside": """
import os
def put(p):
    with open(p, 'w') as f: f.write('x')
def attack(): return tried(*[(p, lambda p=p: put(p)) for p in (
    '/x', '/app/x', '/app/grailnode/sandbox/inside/tester.py', os.__file__, '/usr/lib/x', '/etc/x', '/lib/x')],
    ('mkdir', lambda: os.mkdir('/y')), ('remove', lambda: os.remove(os.__file__)),
    ('chmod', lambda: os.chmod(os.__file__, 0o777)))
""",
    "links": """
import os
def through(target):
    os.symlink(target, '/tmp/link')
    try:
        return open('/tmp/link').read()
    finally:
        os.remove('/tmp/link')
def replace():
    os.symlink('/tmp', '/tmp/inside')
    os.rename('/tmp/inside', '/app/grailnode/sandbox/inside')
def attack(): return tried(
    ('shadow', lambda: through('/etc/shadow')), ('up', lambda: through('../' * 9 + 'etc/shadow')),
    ('root', lambda: through('/proc/1/root')),
    ('replace', replace), ('hard', lambda: os.link(os.__file__, '/tmp/os')), ('chroot', lambda: os.chroot('/tmp')))
""",
    "limits": """
import resource
def attack(): return tried(*[(str(what), lambda what=what: resource.setrlimit(what, (-1, -1))) for what in (
    resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)])
""",
    "the kernel": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(*numbers):
    if libc.syscall(*numbers) < 0: raise OSError(ctypes.get_errno(), 'refused')
def attack(): return tried(
    ('unshare', lambda: call(272, 0x10000000)), ('ptrace', lambda: call(101, 16, 1, 0, 0)),
    ('bpf', lambda: call(321, 0, 0, 0)), ('mount', lambda: call(165, 0, 0, 0, 0, 0)),
    ('io_uring', lambda: call(425, 1, 0)), ('setuid', lambda: os.setuid(0)),
    ('keyring', lambda: call(250, 0, -3, 0, 0, 0)),
    ('clone', lambda: call(56, 17, 0, 0, 0, 0)), ('clone3', lambda: call(435, 0, 0)))
""",
}


@pytest.mark.parametrize("attack", ATTACKS_WITHOUT_GAIN)
def test_an_attack_gains_nothing(sandbox: BubblewrapSandbox, attack: str) -> None:
    if attack == "the kernel" and os.uname().machine != "x86_64":
        pytest.skip("the numbers of these calls are x86-64's")
    assert not has_gain(sandbox, ATTACKS_WITHOUT_GAIN[attack])


def test_a_solution_cannot_read_secrets_of_the_node(
    sandbox: BubblewrapSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAILNODE_SECRET", "sesame")
    key = tmp_path / "miner.key"
    key.write_text("sesame")
    attack = f"""
import os
def environment():
    allowed = 'PYTHONHASHSEED PYTHONUTF8 PYTHONHOME PYTHONPATH LD_LIBRARY_PATH PWD LC_CTYPE'
    if set(os.environ) - set(allowed.split()):
        return dict(os.environ)
    raise OSError
def attack(): return tried(
    ('key', lambda: open({str(key)!r}).read()), ('repository', lambda: os.listdir({str(Path(__file__).parents[2])!r})),
    ('environment', environment))
"""
    assert not has_gain(sandbox, attack)


ATTACKS_ON_TESTS = {
    "exit at once": "import os\nos._exit(0)",
    "exit in the call": "import os\ndef f(x): os._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "crash": "import ctypes\nctypes.string_at(0)",
    "equal to all": "class A(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\ndef f(x): return A()",
    "equal to all in a list": "class A(list):\n    __eq__ = lambda s, o: True\ndef f(x): return A()",
    "other built-ins": """
import builtins
builtins.AssertionError = ValueError
builtins.abs = lambda x: 0
def f(x): return 0
""",
    "other wire": """
from grailnode.sandbox.inside import wire
wire.receive = lambda channel: (b'k', ['f', [1], {}])
wire._unpack = lambda value: True
def f(x): return True
""",
    "raise what the tests catch": "def f(x): raise AssertionError",
    "frames on every channel": """
import os, json
for fd in range(3, 32):
    for kind in (b'l', b'v', b'1', b'r', b'c'):
        payload = kind + b'true'
        try: os.write(fd, (len(payload)).to_bytes(4, 'big') + payload)
        except OSError: pass
def f(x): return True
""",
    "verdict bytes on every channel": """
import os
for fd in range(32):
    try: os.write(fd, b'rc11111')
    except OSError: pass
def f(x): return None
""",
    "hostile frame": """
import os
for fd in range(3, 32):
    payload = b'v' + b'[' * 100000
    try: os.write(fd, (len(payload)).to_bytes(4, 'big') + payload)
    except OSError: pass
""",
    "kill all": "import os, signal\nfor p in (os.getppid(), 1, -1):\n    os.kill(p, signal.SIGKILL)",
    "close all": "import os\nos.closerange(0, 32)",
    "look for the tests": """
import gc, sys
def f(x):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()) + gc.get_objects():
            if isinstance(value, str) and 'marker_of_the_tests' in value and len(value) < 200:
                return eval(value.split('==')[1])
        frame = frame.f_back
""",
    "look for the tests in files": """
import os
def f(x):
    for folder, _, names in os.walk('/'):
        for name in names:
            path = os.path.join(folder, name)
            if path.startswith(('/tmp', '/app')) and 'marker_of_the_tests' in open(path, errors='ignore').read():
                return 1000 + x
""",
}


@pytest.mark.parametrize("attack", ATTACKS_ON_TESTS)
def test_no_test_passes_without_a_correct_answer(sandbox: BubblewrapSandbox, attack: str) -> None:
    tests = ("marker_of_the_tests = 1\nassert f(1) == 1001", "assert abs(f(2)) == 1002", "assert f(3) in [1003]")
    task = ProgramTests("def f(x): return 1000 + x", "", tests)
    assert not any(sandbox.attempt(task, ATTACKS_ON_TESTS[attack]).passes)


@pytest.fixture(scope="module")
def strict(sandbox: BubblewrapSandbox) -> BubblewrapSandbox:
    """Return a sandbox with short limits. Its limit of files identifies its processes."""
    assert sandbox.python
    return BubblewrapSandbox.open(OWN, ProgramLimits(cpu_seconds=1, wall_seconds=8.0, files=FILES))


ENDLESS_PROGRAMS = {
    "loop": "while True: pass",
    "loop in the call": "def f():\n    while True: pass",
    "one long instruction": "def f(): return 7 ** (7 ** 20) % 10",
    "slow expression": "import re\ndef f(): return re.match('(a+)+$', 'a' * 40 + 'b')",
    "sleep": "import time\ndef f(): time.sleep(1000)",
    "deaf to signals": """
import signal
for s in range(1, 64):
    try: signal.signal(s, lambda *_: None)
    except (OSError, ValueError): pass
while True: pass
""",
    "output": """
import os
def f():
    for _ in range(1024): print('x' * (1 << 20))
    while True: os.write(1, b'x' * (1 << 20))
""",
    "output on every channel": """
import os
def f():
    while True:
        for fd in range(64):
            try: os.write(fd, b'x' * (1 << 20))
            except OSError: pass
""",
    "detached": """
import ctypes, os
ctypes.CDLL(None).prctl(1, 0)
try: os.setsid()
except OSError: pass
while True: pass
""",
}


@pytest.mark.parametrize("attack", ENDLESS_PROGRAMS)
def test_an_endless_program_is_stopped_and_leaves_no_process(strict: BubblewrapSandbox, attack: str) -> None:
    trial = strict.attempt(ProgramTests("def f(): return 5", "", ("assert f() == 5",)), ENDLESS_PROGRAMS[attack])
    assert trial.compiles
    assert trial.passes == (False,)
    for _ in range(200):
        if not _processes_of(strict):
            return
        time.sleep(0.05)
    raise AssertionError(_processes_of(strict))


def test_a_program_that_fills_the_kernels_memory_with_names_is_stopped(sandbox: BubblewrapSandbox) -> None:
    names = "import os\nfor n in range(200_000): os.symlink('x' * 120, f'/tmp/{n}' + 'n' * 200)\ndef f(): return 5"
    assert sandbox.attempt(ProgramTests("def f(): return 5", "", ("assert f() == 5",)), names).passes == (False,)


def _processes_of(sandbox: BubblewrapSandbox) -> list[str]:
    """Return the command lines of living processes of a sandbox with a limit of FILES files."""
    command_lines = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                line = (directory / "cmdline").read_bytes()
            except OSError:
                continue
            if b"grailnode.sandbox.inside" in line and line.endswith(b"\0%d\0" % FILES):
                command_lines.append(line.decode(errors="replace"))
    return command_lines


def test_a_sandbox_that_breaks_later_raises_an_error(sandbox: BubblewrapSandbox) -> None:
    unusable = BubblewrapSandbox("/bin/false", sandbox.interpreter, ProgramLimits())
    with pytest.raises(SandboxError, match="did not start"):
        unusable.attempt(ProgramTests("def f(): pass", "", ("f()",)), "def f(): pass")
