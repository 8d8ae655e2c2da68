"""The documents agree with the repository: commands parse, cited files, tests, modules and links exist."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployment.commands import parse

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OPERATOR_PAGES = [ROOT / "README.md", *sorted((DOCS / "guide").glob("*.md")), DOCS / "understand" / "threat-model.md"]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
ADRS = sorted((DOCS / "adr").glob("[0-9]*.md"))
FOLDERS = ("protocol", "roles", "grailnode", "bench", "tests", "docs", "docker")
PACKAGES = ("protocol", "roles", "grailnode", "bench", "tests")
FOREIGN_NAMES = {"TransferManager", "MicroBatchReceiver", "CheckpointEngine", "send_weights", "generate_sequences"}
"""Names of other projects that pages mention and no code uses."""
EVENT_ARGUMENTS = dict.fromkeys(("event", "report", "_report", "_report_once", "_reporting"), 0)
EVENT_ARGUMENTS |= dict.fromkeys(("ChangeReporter", "WaitReporter"), 1)
"""The calls that log events, with the number of the argument that is the event's name."""

_code_block = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_inline_code = re.compile(r"`([^`\n]+)`")
_cited_test = re.compile(r"\b(tests/[\w/.-]+?)(?:::(\w+))?`")
_path = re.compile(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/(?!\d)[\w/.*-]*[\w*/]")
_module = re.compile(rf"(?<![\w/.-])(?:{'|'.join(PACKAGES)})(?:\.[a-z_]\w*)+")
_snake_name = re.compile(r"`(?!grailnode_)([a-z]\w*_\w+)(?:\(\w*\))?`")
_class_name = re.compile(r"`((?:[A-Z][a-z0-9]+){2,})\b")
_link = re.compile(r"\]\(([^)\s]+)\)")
_tour_row = re.compile(r"^\| [^|]+ \| `([\w/]+\.py)` \| ([^|]+) \|$", re.MULTILINE)
_heading = re.compile(r"^#+ (.+)$", re.MULTILINE)


def commands(lines: list[str]) -> list[str]:
    """Return the `grailnode` commands of some lines, with continued lines joined."""
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [part for part in parts if re.match(r"grailnode (?!demo +run )[a-z-]", part)]


def block_commands(page: str) -> list[str]:
    """Return the commands of a page's code blocks, which are complete."""
    return commands([line for block in _code_block.findall(page) for line in block.replace("\\\n", " ").splitlines()])


def prose_commands(page: str) -> list[str]:
    """Return the commands that a page's prose mentions, mostly without their required options."""
    return commands(_inline_code.findall(_code_block.sub("", page)))


COMMANDS = [
    pytest.param(line, complete, id=f"{page.stem}: {line[:60]}")
    for page in OPERATOR_PAGES
    for complete, extract in ((True, block_commands), (False, prose_commands))
    for line in extract(page.read_text(encoding="utf-8"))
]
CITED = sorted({match for page in PAGES for match in _cited_test.findall(page.read_text(encoding="utf-8"))})


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=page_name)


@pytest.mark.parametrize(("line", "complete"), COMMANDS)
def test_a_command_is_one_of_the_programs(line: str, complete: bool) -> None:
    words = shlex.split(re.sub(r"\.\.\.|[\[\]]", "", line), comments=True)  # [--json] marks an optional word
    parse(words[1:], whole=complete)


def definitions(file: Path) -> set[str]:
    """Return the names of a module's functions, methods and classes."""
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }


@pytest.mark.parametrize(("path", "name"), CITED, ids=lambda part: part or "all")
def test_a_cited_test_exists(path: str, name: str) -> None:
    assert (ROOT / path).exists() or list(ROOT.glob(path))
    assert not name or name in definitions(ROOT / path), f"{path} has no {name}"


def test_every_attack_of_the_table_names_a_test() -> None:
    page = (DOCS / "understand" / "threat-model.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| attack |")]
    assert len(rows) >= 130
    for row in rows:
        assert len(row.strip("|").split(" | ")) == 3, row
        assert _cited_test.search(row) or "no test:" in row, row


def logged_events() -> set[str]:
    """Return the names of the events that calls of the program log."""
    names: set[str] = set()
    for file in (file for folder in ("grailnode", "roles") for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                index = EVENT_ARGUMENTS.get(getattr(node.func, "attr", getattr(node.func, "id", "")), len(node.args))
                parts = [part for argument in node.args[index : index + 1] for part in ast.walk(argument)]
                names |= {str(part.value) for part in parts if isinstance(part, ast.Constant)}
    return {name for name in names if re.fullmatch("[a-z]+(-[a-z]+)*", name)}


def test_the_incidents_of_operate_are_the_events_that_the_program_logs() -> None:
    page = (DOCS / "guide" / "operate.md").read_text(encoding="utf-8")
    section = page[page.index("## Incidents") :].partition("\n## Metrics")[0]
    cells = re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE)
    in_tables = {event.strip("`") for cell in cells for event in cell.split(", ")}
    assert in_tables <= logged_events() <= set(_inline_code.findall(section))


def test_every_name_of_the_tour_is_defined_in_its_file() -> None:
    rows = _tour_row.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(rows) >= 25
    names = [(path, name) for path, cell in rows for name in _inline_code.findall(cell)]
    assert not [(path, name) for path, name in names if name not in definitions(ROOT / path)]


@every_page
def test_every_path_that_a_page_mentions_exists(page: Path) -> None:
    for path in _path.findall(page.read_text(encoding="utf-8")):
        is_made_by_a_recipe = "/my_" in path or "/test_my_" in path  # of CONTRIBUTING
        assert is_made_by_a_recipe or (ROOT / path).exists() or list(ROOT.glob(path)), path


def top_level_names(file: Path) -> set[str]:
    """Return the names that a module binds at its top level."""
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Import() | ast.ImportFrom():
                names |= {alias.asname or alias.name for alias in node.names}
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names


def exists_in_the_source(dotted: str) -> bool:
    """Say whether a dotted name is a module, a package, or a top-level name of one."""
    parts = dotted.split(".")
    for count in (len(parts), len(parts) - 1):
        place = ROOT.joinpath(*parts[:count])
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if file.exists():
            return count == len(parts) or parts[-1] in top_level_names(file)
    return False


@every_page
def test_every_module_that_a_page_mentions_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    mentions = [*_inline_code.findall(text), *re.findall(r"python -m (\S+)", text)]
    names = {name for mention in mentions for name in _module.findall(mention)}
    assert not [name for name in sorted(names) if not exists_in_the_source(name)]


def test_every_name_that_a_page_mentions_is_in_the_source() -> None:
    words = {
        word
        for folder in PACKAGES
        for file in (ROOT / folder).rglob("*.py")
        for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))
    }
    texts = [(page_name(page), page.read_text(encoding="utf-8")) for page in PAGES]
    patterns = (_class_name, _snake_name)
    mentions = {(page, name) for page, text in texts for pattern in patterns for name in pattern.findall(text)}
    assert len(mentions) > 100
    assert not [(page, name) for page, name in sorted(mentions) if name not in words | FOREIGN_NAMES]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub derives them."""
    headings = _heading.findall(_code_block.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Yield the file and the anchor of each relative link of a page."""
    for target in _link.findall(page.read_text(encoding="utf-8")):
        if not re.match(r"https?:", target):
            path, _, anchor = target.partition("#")
            yield (page.parent / path).resolve() if path else page, anchor


@every_page
def test_every_relative_link_resolves(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), target
        assert not anchor or anchor in anchors(target), f"{target} has no heading {anchor}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    linked_pages, queue = set[Path](), [ROOT / "README.md"]
    while queue:
        page = queue.pop()
        if page.suffix == ".md" and page not in linked_pages:
            linked_pages.add(page)
            queue += [target / "README.md" if target.is_dir() else target for target, _ in links(page)]
    assert not [page_name(page) for page in PAGES if page not in linked_pages]


@pytest.mark.parametrize("adr", ADRS, ids=lambda adr: adr.name)
def test_an_adr_has_at_most_230_words_in_the_common_form(adr: Path) -> None:
    text = adr.read_text(encoding="utf-8")
    assert len(text.split()) <= 230
    assert re.match(rf"# {adr.name[:4]}\. [^\n]+\n\n## ", text)
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Decision", "Why", "Alternatives", "Reconsider if"]


def test_the_adr_index_lists_each_adr_by_its_title() -> None:
    titles = {adr.name: re.findall(r"^# \d{4}\. (.+)$", adr.read_text(encoding="utf-8"), re.MULTILINE) for adr in ADRS}
    assert 20 <= len(titles) <= 30
    rows = [f"- [{name[:4]}]({name}) {title}" for name, (title,) in titles.items()]
    index = (DOCS / "adr" / "README.md").read_text(encoding="utf-8")
    assert [line for line in index.splitlines() if line.startswith("- [")] == rows


@every_page
def test_prose_ends_at_120_columns(page: Path) -> None:
    prose = _code_block.sub("", page.read_text(encoding="utf-8"))
    lines = [line for line in prose.splitlines() if not line.startswith(("|", "#", "    "))]
    assert [line for line in lines if len(line) > 120] == []
