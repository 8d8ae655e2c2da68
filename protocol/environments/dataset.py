"""Problems from a data file: JSON Lines in, a training set and a held-out set out (docs/spec/environments.md).

A run names its data file by digest, so the bytes are the founder's; they are read as if they were hostile all the same.
Order of
checks: size, UTF-8, then line by line: JSON, an object, its fields; at last that both sets hold something.
"""

from collections.abc import Callable, Iterator, Mapping

from protocol import bounded_json, limits
from protocol.environments.base import Problem
from protocol.environments.seeded_rng import SeededRng, is_held_out
from protocol.errors import LimitError, MalformedError

Fields = Mapping[str, object]


class Dataset:
    """The two sets, and what is drawn from them: all of an environment but its name and its rewards.

    Args:
        label: keeps the draws and the split of one kind of problems apart from others'.
        data: the file.
        read: makes a problem of a line's fields; it raises `MalformedError` where it cannot.

    Raises:
        MalformedError, LimitError: not such a file; the message gives the line.

    Attributes:
        training: the training problems; kept: the held-out problems; each in the order of the file.
        kept_lines: the line (1, 2, ...) of each held-out problem.
    """

    def __init__(self, label: str, data: bytes, read: Callable[[Fields], Problem]) -> None:
        self._label = label
        sides: dict[bool, dict[str, tuple[int, Problem]]] = {True: {}, False: {}}
        for number, line in _lines(data):
            try:
                problem = read(_fields(line))
            except MalformedError as error:
                raise MalformedError(error.what, f"line {number}") from error
            name = " ".join(problem.prompt.encode().lower().decode().split())  # ASCII case: alike in every Python
            sides[is_held_out(f"{label} {name}")].setdefault(name, (number, problem))
        self.training = tuple(problem for _, problem in sides[False].values())
        self.kept = tuple(problem for _, problem in sides[True].values())
        self.kept_lines = tuple(number for number, _ in sides[True].values())
        for side, problems in (("training", self.training), ("held-out", self.kept)):
            if not problems:
                raise MalformedError(f"no {side} problem among {len(self.problems)}: add some", "data")

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All problems, training ones first."""
        return self.training + self.kept

    @property
    def held_out_size(self) -> int:
        """How many problems are held out."""
        return len(self.kept)

    def problem(self, seed: bytes) -> Problem:
        """The training problem of a seed."""
        return self.training[SeededRng(self._label, seed).below(len(self.training))]

    def held_out(self, index: int) -> Problem:
        """The held-out problem of an index; behind the last they repeat."""
        return self.kept[index % len(self.kept)]


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The lines that say something, with their numbers."""
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


def text(fields: Fields, *names: str, default: str | None = None) -> str:
    """The first field of these names.

    Raises:
        MalformedError: there is none and no default, or it is no text.
    """
    for name in names:
        if name in fields:
            return checked(fields[name], name)
    if default is None:
        raise MalformedError(f"no {' or '.join(map(repr, names))}")
    return default


def checked(value: object, name: str) -> str:
    """A value that is a text which UTF-8 can carry.

    Raises:
        MalformedError: it is none.
    """
    if not isinstance(value, str):
        raise MalformedError(f"{name!r} is no text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise MalformedError(f"{name!r} holds a lone surrogate") from error
    return value
