"""The code generates the golden vectors, page by page."""

from tests.vectors import build, examples, regenerate
from tests.vectors.pseudogradient import generate


def test_the_code_generates_the_vectors() -> None:
    assert regenerate.outdated_pages() == []
    assert {path.stem for path in regenerate.FOLDER.glob("*.json")} == set(build.PAGES)
    assert {path.name for path in generate.HERE.glob("*.json")} == set(generate.texts())


def test_the_code_generates_the_examples_of_the_specification() -> None:
    assert examples.PAGE.read_text(encoding="utf-8") == examples.text()
