"""Writes the golden vectors again: `python -m tests.vectors.regenerate`; with `--check` it only says whether they
differ.
"""

import argparse
import json
import sys
from pathlib import Path

from tests.vectors.build import PAGES

FOLDER = Path(__file__).parent


def text(page: str) -> str:
    """A page's vectors as they lie on disk: one case a line."""
    cases = ",\n".join(json.dumps(case, ensure_ascii=True) for case in PAGES[page]())
    return f"[\n{cases}\n]\n"


def differing() -> list[str]:
    """Pages whose file is not what the code makes."""
    paths = {page: FOLDER / f"{page}.json" for page in PAGES}
    return [
        page for page, path in paths.items() if not path.is_file() or path.read_text(encoding="utf-8") != text(page)
    ]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if anything differs")
    if parser.parse_args().check:
        for page in differing():
            print(f"{page}.json is not what the code makes", file=sys.stderr)
        return 1 if differing() else 0
    for page in PAGES:
        (FOLDER / f"{page}.json").write_text(text(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
