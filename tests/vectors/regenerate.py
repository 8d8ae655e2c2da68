"""Write the golden vectors (`python -m tests.vectors.regenerate`), or check that they are up to date (`--check`)."""

import argparse
import json
import sys
from pathlib import Path

from tests.vectors.build import PAGES

FOLDER = Path(__file__).parent


def text(page: str) -> str:
    """Return the contents of a page's file, with one case per line."""
    cases = ",\n".join(json.dumps(case, ensure_ascii=True) for case in PAGES[page]())
    return f"[\n{cases}\n]\n"


def outdated_pages() -> list[str]:
    """Return the pages whose file differs from what the code generates."""
    paths = {page: FOLDER / f"{page}.json" for page in PAGES}
    return [
        page for page, path in paths.items() if not path.is_file() or path.read_text(encoding="utf-8") != text(page)
    ]


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if anything differs")
    if parser.parse_args().check:
        for page in outdated_pages():
            print(f"{page}.json differs from what the code generates", file=sys.stderr)
        return 1 if outdated_pages() else 0
    for page in PAGES:
        (FOLDER / f"{page}.json").write_text(text(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
