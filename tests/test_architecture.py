"""The house keeps its shape: imports run grailnode -> roles -> protocol, and protocol touches nothing outside itself."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("protocol", "roles", "grailnode")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
IDS = [str(path.relative_to(ROOT)) for path in FILES]

FORBIDDEN = {  # importer (a prefix of the module's name): what it may not import
    "protocol": ("roles", "grailnode"),
    "roles": ("grailnode",),
    "roles.miner": ("roles.validator", "roles.trainer"),
    "roles.validator": ("roles.miner", "roles.trainer"),
    "roles.trainer": ("roles.miner", "roles.validator"),
}
WORLD = {  # what pure code has no business with: files, clocks, networks, processes, ambient randomness, event loops
    *("os", "io", "pathlib", "shutil", "tempfile", "glob", "mmap"),
    *("time", "datetime", "sched"),
    *("random", "secrets", "uuid"),
    *("socket", "ssl", "http", "urllib", "httpx", "requests", "boto3", "botocore"),
    *("subprocess", "multiprocessing", "signal", "sys"),
    *("trio", "asyncio", "anyio", "logging"),
}
VAGUE = {"utils", "util", "common", "helpers", "helper", "shared", "manager", "misc"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, absolute or not, at any depth: (name, level)."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, 0
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.level
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.level


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_there_is_something_to_look_at() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(PACKAGES)


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_imports_run_one_way(path: Path) -> None:
    name = module_name(path)
    refused = [outer for inner, outers in FORBIDDEN.items() if within(name, inner) for outer in outers]
    wrong = [target for target, _ in imports(path) if any(within(target, outer) for outer in refused)]
    assert not wrong


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_imports_are_absolute(path: Path) -> None:
    assert not [target for target, level in imports(path) if level]


@pytest.mark.parametrize("path", [path for path in FILES if module_name(path).startswith("protocol")], ids=module_name)
def test_protocol_is_pure(path: Path) -> None:
    assert not [target for target, _ in imports(path) if target.split(".")[0] in WORLD]


@pytest.mark.parametrize("path", [path for path in FILES if module_name(path).startswith("protocol")], ids=module_name)
def test_protocol_opens_no_file(path: Path) -> None:
    calls = [node.func for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    names = {call.id for call in calls if isinstance(call, ast.Name)}
    assert not names & {"open", "input", "print", "exec", "eval"}


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_names_say_what_a_module_does(path: Path) -> None:
    assert not VAGUE & set(module_name(path).split("."))
