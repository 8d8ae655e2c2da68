"""A store that injects faults, the same ones for the same seed.

Real or hostile storage shows each of the faults. One FaultyStore around another gives two faults at once. Several
nodes' views of one store share a `PutHistory`, so that a stale answer to one node can be an object of another node.
"""

import random
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeVar

import trio

from roles.ports import NotFoundError, ObjectInfo, ObjectStore, StoreError


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


Entry = TypeVar("Entry")

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


def alter_listing(infos: Sequence[Entry], fault: Fault, rng: random.Random) -> Sequence[Entry]:
    """Return the entries of a listing after a fault other than a stale one."""
    if fault is Fault.LIST_GAPS:
        return [info for info in infos if rng.random() < 0.7]
    if fault is Fault.LIST_TWICE:
        return [copy for info in infos for copy in [info] * rng.choice((1, 1, 2))]
    if fault is Fault.LIST_SHUFFLED:
        return rng.sample(infos, len(infos))
    if fault is Fault.LIST_BROKEN:
        return infos[: rng.randrange(len(infos) + 1)]
    return infos


class FaultyStore:
    """Decorates a store with faults.

    Args:
        store: the store without faults.
        rng: decides about faults; the same seed and the same calls give the same ones.
        rates: probability of each fault for an operation that it can affect; at most 1 in sum for any operation.
        delay: seconds that a late answer takes, and that an error takes over a link that is cut.
        history: shared by all views of one store; a new one by default.

    Attributes:
        link: what the link delivers; it can be set at any time.
        trace: (operation, path, fault) for every fault so far.
    """

    def __init__(
        self,
        store: ObjectStore,
        rng: random.Random,
        rates: Mapping[Fault, float] | None = None,
        *,
        delay: float = 1.0,
        history: PutHistory | None = None,
    ) -> None:
        self._store = store
        self._rng = rng
        self._rates = dict(rates or {})
        self._delay = delay
        self._history = history if history is not None else PutHistory()
        self._plans: deque[tuple[str, Fault]] = deque()
        self._pending_duplicates: list[tuple[str, bytes | None]] = []
        self._end_of_faults = trio.Event()
        self.link = Link.OPEN
        self.trace: list[tuple[str, str, Fault]] = []

    def plan(self, operation: str, fault: Fault) -> None:
        """Plan a fault for the next such operation; several plans for one operation happen in order.

        Raises:
            ValueError: the fault cannot affect the operation.
        """
        if fault not in applicable[operation]:
            raise ValueError(f"{fault.name} cannot affect a {operation}")
        self._plans.append((operation, fault))

    def stop_faults(self) -> None:
        """Stop injecting faults: hanging operations fail, planned faults and delayed puts are dropped."""
        self._end_of_faults.set()
        self._rates.clear()
        self._plans.clear()
        self._pending_duplicates.clear()

    async def put(self, path: str, data: bytes) -> None:
        await self._write("put", path, data)

    async def delete(self, path: str) -> None:
        await self._write("delete", path, None)

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        """Implements ObjectStore.get, faults aside; no answer is longer than `max_bytes`."""
        fault = await self._start("get", path)
        if fault is Fault.MISSING:
            raise NotFoundError(f"{path}: no such object (injected)")
        if fault is Fault.STALE and path in self._history.replaced_objects:
            old = self._history.replaced_objects[path]
            data = old[offset : None if size is None else offset + size]
        elif fault is Fault.WRONG_OBJECT and self._history.recent_paths:
            data = self._history.current_objects[
                self._history.recent_paths[self._rng.randrange(len(self._history.recent_paths))]
            ]
        else:
            data = await self._store.get(path, max_bytes, offset=offset, size=size)
        await self._finish("get", path, fault)
        return alter_bytes(data, fault, self._rng)[:max_bytes]

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        fault = await self._start("list", prefix)
        await self._finish("list", prefix, fault)
        if fault is None or not fault.name.startswith("LIST_"):
            async for info in self._store.list(prefix, after=after):
                yield info
            return
        honest = [info async for info in self._store.list(prefix, after=after)]
        if fault is Fault.LIST_STALE:
            honest = [info for info in honest if info.path not in self._history.recent_paths]
        infos = alter_listing(honest, fault, self._rng)
        for info in infos:
            yield info
        if fault is Fault.LIST_BROKEN:
            raise StoreError(f"{prefix}: the listing broke off (injected)")
        while fault is Fault.LIST_ENDLESS and infos:
            await trio.lowlevel.checkpoint()
            yield infos[-1]

    async def _write(self, operation: str, path: str, data: bytes | None) -> None:
        """Put the data, or delete what is there; faults aside."""
        fault = await self._start(operation, path)
        if fault is not Fault.LOST_WRITE:
            await self._write_through(path, data)
            if data is not None:
                self._history.record_put(path, data)
        if fault is Fault.DUPLICATE_WRITE:
            self._pending_duplicates.append((path, data))
        await self._finish(operation, path, fault)

    async def _write_through(self, path: str, data: bytes | None) -> None:
        await (self._store.delete(path) if data is None else self._store.put(path, data))

    async def _start(self, operation: str, path: str) -> Fault | None:
        """Choose the operation's fault, and raise it if it happens before the operation takes effect."""
        await self._deliver_duplicate()
        if self.link is Link.NO_REQUESTS:
            await trio.sleep(self._delay)
            raise StoreError(f"{path}: no connection (injected)")
        fault = self._choose(operation)
        if fault is None:
            return None
        self.trace.append((operation, path, fault))
        if fault is Fault.ERROR:
            raise StoreError(f"{path}: failed before it took effect (injected)")
        if fault is Fault.HANG:
            await self._end_of_faults.wait()
            raise StoreError(f"{path}: the connection broke after a long silence (injected)")
        return fault

    async def _finish(self, operation: str, path: str, fault: Fault | None) -> None:
        """Delay the answer, or raise the loss of it."""
        if fault is Fault.DELAY:
            await trio.sleep(self._delay * self._rng.uniform(0.5, 2.0))
        if self.link is Link.NO_ANSWERS:
            await trio.sleep(self._delay)
            raise StoreError(f"{path}: no answer (injected)")
        if fault is Fault.LOST_ANSWER:
            raise StoreError(f"{path}: {operation} took effect, its answer was lost (injected)")

    async def _deliver_duplicate(self) -> None:
        """Deliver the duplicate of an earlier write, with probability one half."""
        if self._pending_duplicates and self._rng.random() < 0.5:
            place = self._rng.randrange(len(self._pending_duplicates))
            await self._write_through(*self._pending_duplicates.pop(place))

    def _choose(self, operation: str) -> Fault | None:
        for number, (plan_operation, fault) in enumerate(self._plans):
            if plan_operation == operation:
                del self._plans[number]
                return fault
        draw = self._rng.random()
        for fault in applicable[operation]:
            draw -= self._rates.get(fault, 0.0)
            if draw < 0:
                return fault
        return None
