"""Problems from a data file: JSON Lines in, a training set and a held-out set out (docs/spec/environments.md).

A run names its data file by digest, so the bytes are the founder's; they are read as if they were hostile all the same. Order of
checks: size, UTF-8, then line by line: JSON, an object, its fields; at last that both sets hold something.
"""

from collections.abc import Callable, Mapping
from typing import Final

from protocol import jsontext
from protocol.environments.base import Problem
from protocol.environments.draws import Draws, is_held_out
from protocol.errors import LimitError, MalformedError

MAX_DATA_BYTES: Final = 64 << 20  # one data file
MAX_LINE_BYTES: Final = 1 << 18  # one problem
MAX_PROBLEMS: Final = 1 << 20  # lines of one data file

Fields = Mapping[str, object]


class Dataset:
    """The two sets, and what is drawn from them.

    Args:
        label: the environment's name: keeps its draws and its split apart from others'.
        data: the file.
        read: makes a problem of a line's fields; it raises `MalformedError` where it cannot.
        identity: the text that names a problem for the split; the same problem in other spacing or case stays on its side.

    Raises:
        MalformedError, LimitError: not such a file.
    """

    def __init__(
        self, label: str, data: bytes, read: Callable[[Fields], Problem], identity: Callable[[Problem], str]
    ) -> None:
        self._label = label
        sides: dict[bool, dict[str, Problem]] = {True: {}, False: {}}
        for number, line in enumerate(_lines(data), 1):
            try:
                problem = read(_fields(line))
            except MalformedError as error:
                raise MalformedError(error.what, f"line {number}") from error
            name = " ".join(identity(problem).encode().lower().decode().split())  # ASCII case: alike in every Python
            sides[is_held_out(f"{label} {name}")].setdefault(name, problem)
        self._training = tuple(sides[False].values())
        self._held_out = tuple(sides[True].values())
        for side, problems in (("training", self._training), ("held-out", self._held_out)):
            if not problems:
                raise MalformedError(
                    f"no {side} problem among {len(sides[True]) + len(sides[False])}: add some", "data"
                )

    @property
    def training(self) -> tuple[Problem, ...]:
        """The training problems, in the order of the file."""
        return self._training

    @property
    def kept(self) -> tuple[Problem, ...]:
        """The held-out problems, in the order of the file."""
        return self._held_out

    def problem(self, seed: bytes) -> Problem:
        """The training problem of a seed."""
        return self._training[Draws(self._label, seed).below(len(self._training))]

    def held_out(self, index: int) -> Problem:
        """The held-out problem of an index; behind the last they repeat."""
        return self._held_out[index % len(self._held_out)]


def _lines(data: bytes) -> list[bytes]:
    if len(data) > MAX_DATA_BYTES:
        raise LimitError(f"{len(data)} bytes, more than {MAX_DATA_BYTES}", "data")
    lines = [line for line in data.split(b"\n") if line.strip()]
    if len(lines) > MAX_PROBLEMS:
        raise LimitError(f"{len(lines)} problems, more than {MAX_PROBLEMS}", "data")
    return lines


def _fields(line: bytes) -> Fields:
    if len(line) > MAX_LINE_BYTES:
        raise MalformedError(f"{len(line)} bytes, more than {MAX_LINE_BYTES}")
    fields = jsontext.parse(line)
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
