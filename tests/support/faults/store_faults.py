"""What storage can do wrong: the catalogue, and what each fault makes of an answer."""

import random
from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from roles.ports import ObjectInfo


class Fault(Enum):
    """What can go wrong with one operation."""

    ERROR = "an error, nothing done"
    LOST_ANSWER = "done, but the answer is an error (a timeout after the commit)"
    DELAY = "a late answer"
    HANG = "no answer at all"
    FORGOTTEN = "acknowledged, but not done"
    REPEATED = "done again later"
    MISSING = "not found, though it is there"
    TRUNCATED = "the first part of the object"
    EXTENDED = "bytes behind the object's end"
    FLIPPED = "one bit differs"
    STALE = "what lay there before"
    SWAPPED = "another object's bytes"
    LIST_STALE = "a listing without what was written last"
    LIST_GAPS = "a listing with objects left out"
    LIST_TWICE = "a listing with objects given twice"
    LIST_SHUFFLED = "a listing out of order"
    LIST_BROKEN = "a listing that breaks off with an error"
    LIST_ENDLESS = "a listing that never ends"


_any: Final = (Fault.ERROR, Fault.DELAY, Fault.HANG)
_write: Final = (*_any, Fault.LOST_ANSWER, Fault.FORGOTTEN, Fault.REPEATED)
_bend: Final = (Fault.TRUNCATED, Fault.EXTENDED, Fault.FLIPPED, Fault.STALE, Fault.SWAPPED)

applicable: Final[Mapping[str, tuple[Fault, ...]]] = {
    "put": _write,
    "delete": _write,
    "get": (*_any, Fault.MISSING, *_bend),
    "list": (*_any, *(fault for fault in Fault if fault.name.startswith("LIST_"))),
}
"""Which faults can befall which operation."""


class Link(Enum):
    """What passes between a node and the store."""

    OPEN = "everything"
    NO_REQUESTS = "nothing: no request arrives"
    NO_ANSWERS = "requests only: they take effect, and the node never hears of it"


@dataclass
class Past:
    """What the store's writers wrote, for stale answers.

    Attributes:
        before: by path, the object that the latest put replaced; current: the one it put.
        recent: the paths put last.
    """

    before: dict[str, bytes] = field(default_factory=dict)
    current: dict[str, bytes] = field(default_factory=dict)
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=8))

    def note(self, path: str, data: bytes) -> None:
        """Remember a put."""
        if path in self.current:
            self.before[path] = self.current[path]
        self.current[path] = data
        self.recent.append(path)


def bend(data: bytes, fault: Fault | None, rng: random.Random) -> bytes:
    """An object's bytes as the fault leaves them."""
    if fault is Fault.EXTENDED:
        return data + rng.randbytes(1 + rng.randrange(64))
    if not data or fault not in {Fault.TRUNCATED, Fault.FLIPPED}:
        return data
    place = rng.randrange(len(data))
    if fault is Fault.TRUNCATED:
        return data[:place]
    return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]


def bend_list(
    infos: Sequence[ObjectInfo], fault: Fault, recent: Container[str], rng: random.Random
) -> Sequence[ObjectInfo]:
    """A listing as the fault leaves it; `recent` are the paths that a stale one does not know."""
    if fault is Fault.LIST_STALE:
        return [info for info in infos if info.path not in recent]
    if fault is Fault.LIST_GAPS:
        return [info for info in infos if rng.random() < 0.7]
    if fault is Fault.LIST_TWICE:
        return [copy for info in infos for copy in [info] * rng.choice((1, 1, 2))]
    if fault is Fault.LIST_SHUFFLED:
        return rng.sample(infos, len(infos))
    if fault is Fault.LIST_BROKEN:
        return infos[: rng.randrange(len(infos) + 1)]
    return infos
