"""The specification names every field of every record, so that the two cannot drift apart in silence."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from blake3 import blake3

import protocol
import roles
from protocol import limits
from protocol.encoding import Record
from protocol.identity.signing import PublishedRecord
from protocol.rollout.sampling import _table

SPEC = Path(__file__).parent.parent / "docs" / "spec"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(SPEC.glob("*.md"))}


def _records() -> list[type[Record]]:
    for package in (protocol, roles):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            importlib.import_module(module.name)
    found: list[type[Record]] = []
    waiting: list[type[Record]] = [Record]
    while waiting:
        below = waiting.pop().__subclasses__()
        found += below
        waiting += below
    return sorted(found, key=lambda record: record.__name__)


RECORDS = [
    record
    for record in _records()
    if record.__module__.startswith(("protocol", "roles")) and record is not PublishedRecord  # which has no kind
]
SPECIFIED = [record for record in RECORDS if record.__module__.startswith("protocol")]


def _tables(kind: str) -> list[str]:
    """The tables headed by a kind, over all pages: their rows as one text each."""
    pattern = re.compile(rf"^\| `{re.escape(kind)}` \|.*\n\|---.*\n((?:\|.*\n)+)", re.MULTILINE)
    return [match.group(1) for page in PAGES.values() for match in pattern.finditer(page)]


@pytest.mark.parametrize("record", SPECIFIED, ids=lambda record: record.__name__)
def test_a_record_has_its_fields_in_the_specification(record: type[Record]) -> None:
    rows = "".join(_tables(record.kind)) or "".join(PAGES.values())
    named = set(re.findall(r"`([a-z_0-9]+)`", rows))
    assert set(record.model_fields) <= named


@pytest.mark.parametrize("record", SPECIFIED, ids=lambda record: record.__name__)
def test_a_table_names_no_field_that_is_gone(record: type[Record]) -> None:
    fields = {
        field for rows in _tables(record.kind) for field in re.findall(r"^\| `([a-z_0-9]+)` \|", rows, re.MULTILINE)
    }
    assert fields <= set(record.model_fields)


def test_kinds_are_unique() -> None:
    kinds = [record.kind for record in RECORDS]
    assert sorted(kinds) == sorted(set(kinds))
    assert all(re.fullmatch(r"[a-z-]{1,32}", kind) for kind in kinds)


def test_every_limit_that_the_specification_names_exists() -> None:
    named = {name for page in PAGES.values() for name in re.findall(r"`(MAX_[A-Z_]+)`", page)}
    assert named <= set(vars(limits))


def test_every_page_is_listed() -> None:
    listed = set(re.findall(r"\]\(([a-z]+)\.md\)", PAGES["README"]))
    assert set(PAGES) - {"README"} <= listed


def test_the_table_of_the_noise_is_the_one_that_the_page_names() -> None:
    table = _table(torch.device("cpu")).to(torch.int32)
    assert blake3(table.numpy().astype("<i4").tobytes()).hexdigest() in PAGES["sampling"]
