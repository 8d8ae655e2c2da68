"""The size of this repository, which it is to keep: `python -m bench.repository_size`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]


def _lines(*folders: str) -> int:
    """Count lines of Python. Files of others, which lie unchanged in folders named `vendor` (uPlot), do not count."""
    files = (file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return sum(text.count("\n") for text in _texts(file for file in files if "vendor" not in file.parts))


def _texts(files: Iterable[Path]) -> list[str]:
    return [file.read_text(encoding="utf-8") for file in files]


def repository_size() -> dict[str, int]:
    """Return the lines of the product and of the tests, and the words of the pages that are written by hand."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    written = _texts(page for page in pages if (ROOT / "docs" / "reference") not in page.parents)
    return {
        "lines of protocol, roles and grailnode": _lines("protocol", "roles", "grailnode"),
        "lines of tests": _lines("tests"),
        "words of documents, without docs/reference": sum(len(text.split()) for text in written),
    }


if __name__ == "__main__":
    for what, size in repository_size().items():
        print(f"{size:7,} {what}")
