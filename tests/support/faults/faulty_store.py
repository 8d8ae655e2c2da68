"""A store that misbehaves on purpose, the same way for the same seed: the simulator's adversary.

Each fault is one that real storage or a hostile one shows. Wrap one FaultyStore in another to have two faults at once.
Several nodes' views of one store share a `Past`, so that a stale answer to one node can be what another wrote.
"""

import random
from collections import deque
from collections.abc import AsyncIterator, Mapping

import trio

from roles.ports import NotFoundError, ObjectInfo, ObjectStore, StoreError
from tests.support.faults.store_faults import Fault, Link, Past, applicable, bend, bend_list


class FaultyStore:
    """Decorates a store with faults.

    Args:
        store: the honest one.
        rng: decides; the same seed and the same calls give the same faults.
        rates: probability of each fault, per operation that it can befall; at most 1 in sum for any operation.
        delay: seconds that a late answer takes, and that an error takes over a link that is cut.
        past: shared by all views of one store; a new one by default.

    Attributes:
        link: what passes; set it at any time.
        trace: (operation, path, fault) for every fault so far.
    """

    def __init__(
        self,
        store: ObjectStore,
        rng: random.Random,
        rates: Mapping[Fault, float] | None = None,
        *,
        delay: float = 1.0,
        past: Past | None = None,
    ) -> None:
        self._store = store
        self._rng = rng
        self._rates = dict(rates or {})
        self._delay = delay
        self._past = past if past is not None else Past()
        self._planned: deque[tuple[str, Fault]] = deque()
        self._again: list[tuple[str, bytes | None]] = []
        self._calm = trio.Event()
        self.link = Link.OPEN
        self.trace: list[tuple[str, str, Fault]] = []

    def plan(self, operation: str, fault: Fault) -> None:
        """Let the next such operation meet this fault; plans for one operation are met in the order they were made.

        Raises:
            ValueError: the fault cannot befall the operation.
        """
        if fault not in applicable[operation]:
            raise ValueError(f"{fault.name} cannot befall a {operation}")
        self._planned.append((operation, fault))

    def calm(self) -> None:
        """Stop injecting faults: hanging operations fail, planned faults and delayed puts are dropped."""
        self._calm.set()
        self._rates.clear()
        self._planned.clear()
        self._again.clear()

    async def put(self, path: str, data: bytes) -> None:
        """Implements ObjectStore.put, faults aside."""
        fault = await self._meet("put", path)
        if fault is not Fault.FORGOTTEN:
            await self._store.put(path, data)
            self._past.note(path, data)
        if fault is Fault.REPEATED:
            self._again.append((path, data))
        await self._answer("put", path, fault)

    async def delete(self, path: str) -> None:
        """Implements ObjectStore.delete, faults aside."""
        fault = await self._meet("delete", path)
        if fault is not Fault.FORGOTTEN:
            await self._store.delete(path)
        if fault is Fault.REPEATED:
            self._again.append((path, None))
        await self._answer("delete", path, fault)

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        """Implements ObjectStore.get, faults aside; bent answers keep to `max_bytes`."""
        fault = await self._meet("get", path)
        if fault is Fault.MISSING:
            raise NotFoundError(f"{path}: no such object (injected)")
        if fault is Fault.STALE and path in self._past.before:
            old = self._past.before[path]
            data = old[offset : None if size is None else offset + size]
        elif fault is Fault.SWAPPED and self._past.recent:
            data = self._past.current[self._past.recent[self._rng.randrange(len(self._past.recent))]]
        else:
            data = await self._store.get(path, max_bytes, offset=offset, size=size)
        await self._answer("get", path, fault)
        return bend(data, fault, self._rng)[:max_bytes]

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Implements ObjectStore.list, faults aside."""
        fault = await self._meet("list", prefix)
        await self._answer("list", prefix, fault)
        if fault is None or not fault.name.startswith("LIST_"):
            async for info in self._store.list(prefix, after=after):
                yield info
            return
        honest = [info async for info in self._store.list(prefix, after=after)]
        infos = bend_list(honest, fault, self._past.recent, self._rng)
        for info in infos:
            yield info
        if fault is Fault.LIST_BROKEN:
            raise StoreError(f"{prefix}: the listing broke off (injected)")
        while fault is Fault.LIST_ENDLESS and infos:
            await trio.lowlevel.checkpoint()
            yield infos[-1]

    async def _meet(self, operation: str, path: str) -> Fault | None:
        """Choose the operation's fault; raise here what happens before it takes effect."""
        await self._deliver_again()
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
            await self._calm.wait()
            raise StoreError(f"{path}: the connection broke after a long silence (injected)")
        return fault

    async def _answer(self, operation: str, path: str, fault: Fault | None) -> None:
        """Let the answer come late or not at all."""
        if fault is Fault.DELAY:
            await trio.sleep(self._delay * self._rng.uniform(0.5, 2.0))
        if self.link is Link.NO_ANSWERS:
            await trio.sleep(self._delay)
            raise StoreError(f"{path}: no answer (injected)")
        if fault is Fault.LOST_ANSWER:
            raise StoreError(f"{path}: {operation} took effect, its answer was lost (injected)")

    async def _deliver_again(self) -> None:
        """Let a network that duplicates deliver what it held back, if it feels like it."""
        if self._again and self._rng.random() < 0.5:
            path, data = self._again.pop(self._rng.randrange(len(self._again)))
            if data is None:
                await self._store.delete(path)
            else:
                await self._store.put(path, data)

    def _choose(self, operation: str) -> Fault | None:
        for number, (planned, fault) in enumerate(self._planned):
            if planned == operation:
                del self._planned[number]
                return fault
        draw = self._rng.random()
        for fault in applicable[operation]:
            draw -= self._rates.get(fault, 0.0)
            if draw < 0:
                return fault
        return None
