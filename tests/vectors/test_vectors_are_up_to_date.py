"""The code generates the golden vectors, page by page."""

from tests.vectors import build, regenerate
from tests.vectors.pseudogradient import generate


def test_the_code_generates_the_vectors() -> None:
    assert regenerate.outdated_pages() == []
    assert {path.stem for path in regenerate.FOLDER.glob("*.json")} == set(build.PAGES)


def test_the_code_generates_the_vectors_of_contributions() -> None:
    assert {path.name: path.read_text(encoding="utf-8") for path in generate.HERE.glob("*.json")} == generate.texts()
