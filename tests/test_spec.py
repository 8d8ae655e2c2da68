"""The specification and the code have the same records, fields and limits."""

import importlib
import pkgutil
import re
import typing
from pathlib import Path

import pytest
import torch
from blake3 import blake3

import protocol
import roles
from protocol import limits
from protocol.encoding import Record
from protocol.identity.signing import PublishedRecord
from protocol.rollout.sampling import noise_table

SPEC = Path(__file__).parent.parent / "docs" / "spec"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(SPEC.glob("*.md"))}


def _records() -> list[type[Record]]:
    for package in (protocol, roles):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            importlib.import_module(module.name)
    records: list[type[Record]] = []
    queue: list[type[Record]] = [Record]
    while queue:
        subclasses = queue.pop().__subclasses__()
        records += subclasses
        queue += subclasses
    return sorted(records, key=lambda record: record.__name__)


RECORDS = [
    record
    for record in _records()
    if record.__module__.startswith(("protocol", "roles")) and record is not PublishedRecord  # which has no kind
]
SPECIFIED = [record for record in RECORDS if record.__module__.startswith("protocol")]


def _tables(kind: str) -> list[str]:
    """Return the rows of each table with this kind in its header, over all pages."""
    pattern = re.compile(rf"^\| `{re.escape(kind)}` \|.*\n\|---.*\n((?:\|.*\n)+)", re.MULTILINE)
    return [match.group(1) for page in PAGES.values() for match in pattern.finditer(page)]


@pytest.mark.parametrize("record", SPECIFIED, ids=lambda record: record.__name__)
def test_a_record_has_its_fields_in_the_specification(record: type[Record]) -> None:
    rows = "".join(_tables(record.kind)) or "".join(PAGES.values())
    names = set(re.findall(r"`([a-z_0-9]+)`", rows))
    assert set(record.model_fields) <= names


@pytest.mark.parametrize("record", SPECIFIED, ids=lambda record: record.__name__)
def test_a_table_has_no_field_that_the_record_lacks(record: type[Record]) -> None:
    fields = {
        field for rows in _tables(record.kind) for field in re.findall(r"^\| `([a-z_0-9]+)` \|", rows, re.MULTILINE)
    }
    assert fields <= set(record.model_fields)


@pytest.mark.parametrize("record", SPECIFIED, ids=lambda record: record.__name__)
def test_a_record_has_an_example_in_the_specification(record: type[Record]) -> None:
    assert re.search(rf"^{record.kind} \d+ [0-9a-f]{{64}}$", PAGES["examples"], re.MULTILINE)


def _has_float(annotation: object) -> bool:
    return annotation is float or any(map(_has_float, typing.get_args(annotation)))


def test_records_have_floats_only_where_a_rule_is_one_or_a_round_sums_in_a_fixed_order() -> None:
    """Verdicts, ledgers, thresholds, scoring and reports have none."""
    with_floats = {item.__name__ for item in SPECIFIED if any(map(_has_float, typing.get_type_hints(item).values()))}
    rules, rounds = {"LoraSpec", "SamplingSpec", "RoundRules"}, {"RoundContribution", "CountedContribution"}
    assert with_floats == rules | rounds


def test_kinds_are_unique() -> None:
    kinds = [record.kind for record in RECORDS]
    assert sorted(kinds) == sorted(set(kinds))
    assert all(re.fullmatch(r"[a-z-]{1,32}", kind) for kind in kinds)


def test_every_limit_in_the_specification_exists() -> None:
    names = {name for page in PAGES.values() for name in re.findall(r"`(MAX_[A-Z_]+)`", page)}
    assert names <= set(vars(limits))


def test_the_readme_lists_every_page() -> None:
    links = set(re.findall(r"\]\(([a-z-]+)\.md\)", PAGES["README"]))
    assert set(PAGES) - {"README"} <= links


def test_the_noise_table_has_the_digest_in_the_specification() -> None:
    table = noise_table(torch.device("cpu")).to(torch.int32)
    assert blake3(table.numpy().astype("<i4").tobytes()).hexdigest() in PAGES["sampling"]


@pytest.mark.parametrize("page", sorted(SPEC.parent.rglob("*.md")), ids=lambda path: path.stem)
def test_every_row_of_a_table_has_as_many_cells_as_its_head(page: Path) -> None:
    """A browser leaves out cells that the head of a table does not have."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        rows = [re.sub(r"`[^`]*`", "", row).replace(r"\|", "").count("|") for row in table.splitlines()]
        assert set(rows) == {rows[0]}, table
