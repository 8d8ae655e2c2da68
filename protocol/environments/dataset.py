"""Problems from a data file (JSON Lines), split into a training set and a held-out set (docs/spec/environments.md).

The run manifest contains the digest of the data file, so the bytes are those of the run's creator. They are still
treated as hostile. Order of checks: size; for each line: length, UTF-8, JSON, an object, its fields; and last that both
sets have a problem.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction

from protocol import bounded_json, limits
from protocol.environments.base import Problem
from protocol.environments.seeded_rng import SeededRng, is_held_out
from protocol.errors import LimitError, MalformedError

Fields = Mapping[str, object]


class Dataset:
    """The training set and the held-out set of a data file (hostile bytes): an environment without its name and its
    rewards. MalformedError or LimitError gives the line that is at fault.

    The label separates the random streams and the split of one kind of problem from those of others; `read` builds a
    problem from a line's fields, or raises `MalformedError`.
    """

    def __init__(self, label: str, data: bytes, read: Callable[[Fields], Problem]) -> None:
        self._label = label
        sides: dict[bool, dict[str, tuple[int, Problem]]] = {True: {}, False: {}}
        for number, line in _lines(data):
            try:
                fields = _fields(line)
                problem = replace(read(fields), stratum=_stratum(fields))
            except MalformedError as error:
                raise MalformedError(error.what, f"line {number}") from error
            # Lower the case of ASCII letters only, which every version of Python does alike.
            name = " ".join(problem.prompt.encode().lower().decode().split())
            sides[is_held_out(f"{label} {name}")].setdefault(name, (number, problem))
        self.training_problems = tuple(problem for _, problem in sides[False].values())  # in the order of the file
        held_out = _spread(list(sides[True].values()))  # every beginning has the strata in the proportions of the whole
        self.held_out_problems = tuple(problem for _, problem in held_out)
        self.held_out_lines = tuple(number for number, _ in held_out)  # in the file: 1, 2, ...
        for side, problems in (("training", self.training_problems), ("held-out", self.held_out_problems)):
            if not problems:
                raise MalformedError(f"no {side} problem among {len(self.problems)}: add some", "data")

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All problems, with the training problems first."""
        return self.training_problems + self.held_out_problems

    @property
    def held_out_size(self) -> int:
        return len(self.held_out_problems)

    def problem(self, seed: bytes) -> Problem:
        return self.training_problems[SeededRng(self._label, seed).below(len(self.training_problems))]

    def held_out_problem(self, index: int) -> Problem:
        return self.held_out_problems[index % len(self.held_out_problems)]


def _stratum(fields: Fields) -> str:
    """Return the kind of a line's problem: its difficulty or level, if that is an integer or a short text of printable
    ASCII; else nothing.
    """
    for name in ("difficulty", "level"):
        value = fields.get(name)
        text = value if isinstance(value, str) else str(value) if type(value) is int else ""
        if 0 < len(text) <= limits.MAX_STRATUM_CHARS and text.isascii() and text.isprintable():
            return text
    return ""


def _spread(problems: list[tuple[int, Problem]]) -> list[tuple[int, Problem]]:
    """Return problems so that every beginning of the list has about the same proportions of strata: problem i of the m
    of a stratum comes at (2i + 1) / 2m of the way, and of two at one place that of the lower line first.
    """
    members: dict[str, list[tuple[int, Problem]]] = {}
    for item in problems:
        members.setdefault(item[1].stratum, []).append(item)
    places = [
        (Fraction(2 * index + 1, 2 * len(stratum)), item[0], item)
        for stratum in members.values()
        for index, item in enumerate(stratum)
    ]
    return [item for _, _, item in sorted(places, key=lambda place: place[:2])]


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Return the lines that are not blank, with their numbers."""
    if len(data) > limits.MAX_DATA_BYTES:
        raise LimitError(f"{len(data)} bytes, more than {limits.MAX_DATA_BYTES}", "data")
    if data.count(b"\n") > limits.MAX_DATA_LINES:
        raise LimitError(f"more than {limits.MAX_DATA_LINES} lines", "data")
    return ((number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip())


def _fields(line: bytes) -> Fields:
    if len(line) > limits.MAX_DATA_LINE_BYTES:
        raise MalformedError(f"{len(line)} bytes, more than {limits.MAX_DATA_LINE_BYTES}")
    fields = bounded_json.parse(line)
    if not isinstance(fields, dict):
        raise MalformedError("no JSON object")
    return fields


def text_field(fields: Fields, *names: str, default: str | None = None) -> str:
    """Return the first field that has one of these names, or else the default; MalformedError if there is none."""
    for name in names:
        if name in fields:
            return check_text(fields[name], name)
    if default is None:
        raise MalformedError(f"no {' or '.join(map(repr, names))}")
    return default


def check_text(value: object, name: str) -> str:
    """Return a field's value, or raise MalformedError if it is no text that UTF-8 can encode."""
    if not isinstance(value, str):
        raise MalformedError(f"{name!r} is no text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise MalformedError(f"{name!r} holds a lone surrogate") from error
    return value
