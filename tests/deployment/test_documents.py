"""What the operators' pages say exists: each command line parses, each test that they cite is there."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from tests.deployment.commands import parse

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("deploy", "operate", "threat-model"))]

_block = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_inline = re.compile(r"`([^`\n]+)`")
_test = re.compile(r"\b(tests/[\w/.-]+?)(?:::(\w+))?`")


def commands(lines: list[str]) -> list[str]:
    """The `grailnode` commands among lines, continued ones joined."""
    found = [part.strip() for line in lines for part in line.split("&&")]
    return [line for line in found if re.match(r"grailnode (?!demo +run )[a-z-]", line)]


def in_blocks(page: str) -> list[str]:
    """The commands to type."""
    return commands([line for block in _block.findall(page) for line in block.replace("\\\n", " ").splitlines()])


def in_prose(page: str) -> list[str]:
    """The commands that are spoken of, mostly without all that they need."""
    return commands(_inline.findall(_block.sub("", page)))


COMMANDS = [
    pytest.param(line, whole, id=f"{page.stem}: {line[:60]}")
    for page in PAGES
    for whole, find in ((True, in_blocks), (False, in_prose))
    for line in find(page.read_text(encoding="utf-8"))
]
CITED = sorted({match for page in PAGES for match in _test.findall(page.read_text(encoding="utf-8"))})


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 40


@pytest.mark.parametrize(("line", "whole"), COMMANDS)
def test_a_command_is_one_of_the_programs(line: str, whole: bool) -> None:
    words = shlex.split(re.sub(r"\.\.\.|[\[\]]", "", line), comments=True)  # [--json] is said of what may be left out
    parse(words[1:], whole=whole)


@pytest.mark.parametrize(
    "line", ["verify --runn x", "frobnicate", "keys turn x --run y", "status --run x --set node.x=1"]
)
def test_what_is_none_of_the_programs_is_found(line: str) -> None:
    with pytest.raises(AssertionError):
        parse(shlex.split(line))


def functions(file: Path) -> set[str]:
    """Names of a module's functions."""
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize(("path", "name"), CITED, ids=lambda part: part or "all")
def test_a_cited_test_exists(path: str, name: str) -> None:
    assert (ROOT / path).exists()
    assert not name or name in functions(ROOT / path), f"{path} has no {name}"


def test_every_attack_of_the_table_names_a_test() -> None:
    page = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| attacker")]
    assert len(rows) >= 40
    for row in rows:
        assert len(row.strip("|").split(" | ")) == 4, row
        assert _test.search(row) or "no test:" in row, row


def test_events_that_the_pages_speak_of_are_told_by_the_program() -> None:
    source = "\n".join(
        file.read_text() for folder in ("grailnode", "roles", "protocol") for file in (ROOT / folder).rglob("*.py")
    )
    page = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
    table = page[page.index("## Incidents") :].partition("\n## Metrics")[0]
    told = re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)
    assert len(told) >= 10
    for words in told:
        assert words in source, words
