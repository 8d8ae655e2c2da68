"""Write the golden vectors (`python -m tests.vectors.regenerate`), or check that they are up to date (`--check`).

Floats are compared within `FLOAT_TOLERANCE`: logarithms and Fourier transforms differ in their last bits between
processors. All else, and so every byte of a record, is the same on every machine.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any, Final

from tests.vectors.build import PAGES
from tests.vectors.pseudogradient import generate

FOLDER = Path(__file__).parent
FLOAT_TOLERANCE: Final = 1e-9
"""Relative difference of two floats that count as equal."""


def text(page: str) -> str:
    """Return the contents of a page's file, with one case per line."""
    cases = ",\n".join(json.dumps(case, ensure_ascii=True) for case in PAGES[page]())
    return f"[\n{cases}\n]\n"


def outdated_pages() -> list[str]:
    """Return the pages whose file differs from what the code generates, by more than the last bits of floats."""
    paths = {page: FOLDER / f"{page}.json" for page in PAGES}
    return [
        page
        for page, path in paths.items()
        if not path.is_file() or not is_same(json.loads(path.read_text(encoding="utf-8")), json.loads(text(page)))
    ] + [
        f"pseudogradient/{Path(name).stem}"
        for name, content in generate.texts().items()
        if not (generate.HERE / name).is_file() or (generate.HERE / name).read_text(encoding="utf-8") != content
    ]


def is_same(stored: Any, generated: Any) -> bool:
    """Return whether two JSON values are equal, of which floats may differ by FLOAT_TOLERANCE."""
    if type(stored) is not type(generated):
        return False
    if isinstance(stored, float):
        return math.isclose(stored, generated, rel_tol=FLOAT_TOLERANCE)
    if isinstance(stored, list):
        return len(stored) == len(generated) and all(map(is_same, stored, generated))
    if isinstance(stored, dict):
        return stored.keys() == generated.keys() and all(is_same(stored[key], generated[key]) for key in stored)
    return bool(stored == generated)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if anything differs")
    if parser.parse_args().check:
        outdated = outdated_pages()
        for page in outdated:
            print(f"{page}.json differs from what the code generates", file=sys.stderr)
        return 1 if outdated else 0
    for page in PAGES:
        (FOLDER / f"{page}.json").write_text(text(page), encoding="utf-8")
    for name, content in generate.texts().items():
        (generate.HERE / name).write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
