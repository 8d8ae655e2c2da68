"""The faults of storage, and what each of them makes of an answer."""

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
    LOST_WRITE = "acknowledged, but not done"
    DUPLICATE_WRITE = "done again later"
    MISSING = "not found, though it is there"
    TRUNCATION = "the first part of the object"
    EXTRA_BYTES = "bytes behind the object's end"
    BIT_FLIP = "one bit differs"
    STALE = "what lay there before"
    WRONG_OBJECT = "another object's bytes"
    LIST_STALE = "a listing without what was written last"
    LIST_GAPS = "a listing with objects left out"
    LIST_TWICE = "a listing with objects given twice"
    LIST_SHUFFLED = "a listing out of order"
    LIST_BROKEN = "a listing that breaks off with an error"
    LIST_ENDLESS = "a listing that never ends"


_any: Final = (Fault.ERROR, Fault.DELAY, Fault.HANG)
_write: Final = (*_any, Fault.LOST_ANSWER, Fault.LOST_WRITE, Fault.DUPLICATE_WRITE)
_alterations: Final = (Fault.TRUNCATION, Fault.EXTRA_BYTES, Fault.BIT_FLIP, Fault.STALE, Fault.WRONG_OBJECT)

applicable: Final[Mapping[str, tuple[Fault, ...]]] = {
    "put": _write,
    "delete": _write,
    "get": (*_any, Fault.MISSING, *_alterations),
    "list": (*_any, *(fault for fault in Fault if fault.name.startswith("LIST_"))),
}
"""The possible faults of each operation."""


class Link(Enum):
    """What a link between a node and the store delivers."""

    OPEN = "everything"
    NO_REQUESTS = "nothing: no request arrives"
    NO_ANSWERS = "requests only: they take effect, and the node never hears of it"


@dataclass
class PutHistory:
    """The puts of all writers of a store, for stale answers.

    Attributes:
        replaced_objects: by path, the object that the last put replaced.
        current_objects: by path, the object of the last put.
        recent_paths: the paths of the last puts.
    """

    replaced_objects: dict[str, bytes] = field(default_factory=dict)
    current_objects: dict[str, bytes] = field(default_factory=dict)
    recent_paths: deque[str] = field(default_factory=lambda: deque(maxlen=8))

    def record_put(self, path: str, data: bytes) -> None:
        if path in self.current_objects:
            self.replaced_objects[path] = self.current_objects[path]
        self.current_objects[path] = data
        self.recent_paths.append(path)


def alter_bytes(data: bytes, fault: Fault | None, rng: random.Random) -> bytes:
    """Return the bytes of an object after a fault."""
    if fault is Fault.EXTRA_BYTES:
        return data + rng.randbytes(1 + rng.randrange(64))
    if not data or fault not in {Fault.TRUNCATION, Fault.BIT_FLIP}:
        return data
    place = rng.randrange(len(data))
    if fault is Fault.TRUNCATION:
        return data[:place]
    return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]


def alter_listing(
    infos: Sequence[ObjectInfo], fault: Fault, recent_paths: Container[str], rng: random.Random
) -> Sequence[ObjectInfo]:
    """Return a listing after a fault; a stale one lacks `recent_paths`."""
    if fault is Fault.LIST_STALE:
        return [info for info in infos if info.path not in recent_paths]
    if fault is Fault.LIST_GAPS:
        return [info for info in infos if rng.random() < 0.7]
    if fault is Fault.LIST_TWICE:
        return [copy for info in infos for copy in [info] * rng.choice((1, 1, 2))]
    if fault is Fault.LIST_SHUFFLED:
        return rng.sample(infos, len(infos))
    if fault is Fault.LIST_BROKEN:
        return infos[: rng.randrange(len(infos) + 1)]
    return infos
