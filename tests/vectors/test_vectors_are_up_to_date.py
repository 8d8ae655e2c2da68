"""The code generates the golden vectors, page by page."""

import pytest

from tests.vectors import build, examples, regenerate
from tests.vectors.pseudogradient import generate


def test_the_code_generates_the_vectors() -> None:
    assert regenerate.outdated_pages() == []
    assert {path.stem for path in regenerate.FOLDER.glob("*.json")} == set(build.PAGES)
    assert {path.name for path in generate.HERE.glob("*.json")} == set(generate.texts())


def test_the_code_generates_the_examples_of_the_specification() -> None:
    assert examples.PAGE.read_text(encoding="utf-8") == examples.text()


@pytest.mark.parametrize(
    "stored, generated, same",
    [
        (1.902078213157504, 1.9020782131575038, True),
        (1.902078213157504, 1.902078217, False),
        (1e-12, 2e-12, False),
        (1, 1.0, False),
        (12345678901, 12345678902, False),
        ("00ff", "00fe", False),
        ([[1.0], {"a": 2.0}], [[1.0 + 1e-15], {"a": 2.0}], True),
        ([1.0], [1.0, 1.0], False),
        ({"a": 1.0}, {"b": 1.0}, False),
    ],
)
def test_floats_are_compared_within_a_tolerance_and_all_else_exactly(stored: object, generated: object, same: bool):
    assert regenerate.is_same(stored, generated) == same
